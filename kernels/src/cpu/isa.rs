//! Which instruction set a kernel runs on, and the one place where a kernel is compiled for each.

use std::fmt;

#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Portable, Simd};

/// An instruction set that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust; the oracle of the others.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
}

/// No such instruction set, or not on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IsaError {
    /// The name is not one of ours.
    Unknown(String),
    /// This processor lacks it.
    Unavailable(Isa),
}

/// A piece of work that is compiled once per instruction set.
///
/// `run` and what it calls in its inner loops must be `#[inline(always)]`: only code inlined into
/// `Isa::dispatch` is compiled with the instructions of `S`.
pub trait Kernel {
    /// What the work returns.
    type Output;

    /// Do the work with the vectors of `S`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

impl Isa {
    /// All instruction sets, the plainest first.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// Those that this processor has, the plainest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The fastest that this processor has.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// The name in options and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// The instruction set of that name, if this processor has it.
    pub fn from_name(name: &str) -> Result<Self, IsaError> {
        let isa = Self::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| IsaError::Unknown(name.to_owned()))?;
        if isa.is_available() { Ok(isa) } else { Err(IsaError::Unavailable(isa)) }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Avx512::detect().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// Run a kernel on this instruction set.
    ///
    /// # Panics
    /// If this processor lacks it.
    #[inline]
    pub fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Portable => kernel.run(Portable),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => x86::run_avx2(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => x86::run_avx512(kernel),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => panic!("{}", IsaError::Unavailable(self)),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![expect(unsafe_code, reason = "calls functions compiled for instructions that were just detected")]

    use super::{Avx2, Avx512, Isa, IsaError, Kernel};

    pub(super) fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c,popcnt,bmi1,bmi2,lzcnt")]
        fn compiled<K: Kernel>(token: Avx2, kernel: K) -> K::Output {
            kernel.run(token)
        }
        match Avx2::detect() {
            // SAFETY: the token exists only where every instruction enabled above does.
            Some(token) => unsafe { compiled(token, kernel) },
            None => panic!("{}", IsaError::Unavailable(Isa::Avx2)),
        }
    }

    pub(super) fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
        #[target_feature(
            enable = "avx2,fma,f16c,popcnt,bmi1,bmi2,lzcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
        )]
        fn compiled<K: Kernel>(token: Avx512, kernel: K) -> K::Output {
            kernel.run(token)
        }
        match Avx512::detect() {
            // SAFETY: the token exists only where every instruction enabled above does.
            Some(token) => unsafe { compiled(token, kernel) },
            None => panic!("{}", IsaError::Unavailable(Isa::Avx512)),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for IsaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name) => {
                let known = Isa::ALL.map(Isa::name).join(", ");
                write!(f, "unknown instruction set {name:?}; known: {known}")
            }
            Self::Unavailable(isa) => {
                let available: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
                write!(f, "this processor lacks instruction set {isa}; it has: {}", available.join(", "))
            }
        }
    }
}

impl std::error::Error for IsaError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found() {
        for isa in Isa::available() {
            assert_eq!(Isa::from_name(isa.name()), Ok(isa));
        }
        assert_eq!(
            Isa::from_name("mmx").err().map(|error| error.to_string()),
            Some("unknown instruction set \"mmx\"; known: portable, avx2, avx512".to_owned())
        );
    }

    #[test]
    fn dispatch_runs_the_kernel_it_names() {
        struct Name;
        impl Kernel for Name {
            type Output = Isa;
            fn run<S: Simd>(self, _: S) -> Isa {
                S::ISA
            }
        }
        for isa in Isa::available() {
            assert_eq!(isa.dispatch(Name), isa);
        }
    }
}
