//! One slice written by several threads, each its own part of it.
#![expect(unsafe_code, reason = "disjoint parts that the borrow checker cannot see")]

use std::marker::PhantomData;
use std::ops::Range;

/// A slice of which several threads write disjoint parts at once.
#[derive(Debug)]
pub struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: the slice is borrowed exclusively, and `part` leaves it to its callers that no two
// threads hold parts that overlap.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Share `slice` among the units of one piece of work.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The part of the slice at `range`, which is checked.
    ///
    /// # Safety
    /// No other part that overlaps this one is alive, on any thread.
    #[expect(clippy::mut_from_ref, reason = "parts are disjoint, which the caller promises")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "part {range:?} of a slice of {}",
            self.len
        );
        // SAFETY: inside the slice, which the borrow keeps; nothing else refers to this part.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_written_from_several_threads() {
        let mut values = vec![0; 100];
        let shared = SharedSlice::new(&mut values);
        std::thread::scope(|scope| {
            for unit in 0..10 {
                let shared = &shared;
                // SAFETY: every unit has its own tenth.
                scope.spawn(move || unsafe { shared.part(unit * 10..unit * 10 + 10).fill(unit) });
            }
        });
        assert!(values.iter().enumerate().all(|(index, value)| *value == index / 10));
    }

    #[test]
    #[should_panic(expected = "part 3..5 of a slice of 4")]
    fn a_part_outside_the_slice_is_refused() {
        let mut values = [0; 4];
        let shared = SharedSlice::new(&mut values);
        // SAFETY: the only part.
        let _ = unsafe { shared.part(3..5) };
    }
}
