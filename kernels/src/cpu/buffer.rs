//! Memory for weights: zeroed, aligned to cache lines, on huge pages where the system offers them.

#![expect(unsafe_code, reason = "allocation with an alignment of its own")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

const CACHE_LINE: usize = 64;
/// Larger allocations start on a huge page: a linear read crosses 512 times fewer pages.
const HUGE_PAGE: usize = 2 << 20;

/// A number for which all bits zero is a value.
pub trait Number: Copy + Send + Sync + 'static + private::Sealed {}

mod private {
    pub trait Sealed {}
}

macro_rules! numbers {
    ($($number:ty),*) => { $(
        impl private::Sealed for $number {}
        impl Number for $number {}
    )* };
}
numbers!(u8, u16, f32, [u8; 2]);

/// A slice of numbers on the heap that begins on a cache line.
pub struct Buffer<T: Number> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its numbers as a `Vec` does.
unsafe impl<T: Number> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Number> Sync for Buffer<T> {}

impl<T: Number> Buffer<T> {
    /// `len` zeros.
    ///
    /// # Panics
    /// If the size does not fit the address space.
    pub fn zeroed(len: usize) -> Self {
        let Some(layout) = Self::layout(len) else {
            return Self { start: NonNull::dangling(), len: 0 };
        };
        // SAFETY: the layout's size is not zero, and zero bytes are a value of every `Number`.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start.cast::<T>()) else { handle_alloc_error(layout) };
        advise_huge_pages(start.cast(), layout);
        Self { start, len }
    }

    /// Bytes of the numbers.
    pub fn num_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// None for no bytes.
    fn layout(len: usize) -> Option<Layout> {
        let num_bytes = len.checked_mul(size_of::<T>());
        let num_bytes = num_bytes.unwrap_or_else(|| panic!("{len} numbers are too many"));
        let align = if num_bytes >= HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE };
        let layout = Layout::from_size_align(num_bytes, align)
            .unwrap_or_else(|_| panic!("{len} numbers are too many"));
        (num_bytes > 0).then_some(layout)
    }
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(start: NonNull<u8>, layout: Layout) {
    if layout.align() == HUGE_PAGE {
        // SAFETY: the range was just allocated. The advice changes no contents, and a system
        // that does not take it goes on with small pages.
        unsafe { libc::madvise(start.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: NonNull<u8>, _: Layout) {}

impl<T: Number> Drop for Buffer<T> {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: allocated in `zeroed` with this layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) }
        }
    }
}

impl<T: Number> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised numbers, owned; dangling only where `len` is zero.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Number> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Number> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_and_aligned() {
        for len in [0, 1, 63, 1000, HUGE_PAGE / 2 + 1] {
            let mut buffer = Buffer::<u16>::zeroed(len);
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&number| number == 0));
            if len > 0 {
                assert_eq!(buffer.as_ptr() as usize % CACHE_LINE, 0);
            }
            buffer.fill(7);
            assert_eq!(buffer.num_bytes(), 2 * len);
        }
    }
}
