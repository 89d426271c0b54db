//! Elementary functions on vectors: our own polynomials, so that every machine and every
//! instruction set gives the same bits.

use super::simd::Simd;

/// Below this `exp` is zero: the result would be subnormal.
const EXP_LOW: f32 = -87.336_54;
/// Above this `exp` is infinite, a little early (the largest float is e^88.72).
const EXP_HIGH: f32 = 88.376_26;

/// Taylor coefficients 1/7! .. 1/0!; on |r| <= ln(2)/2 the rest is below 2^-27.
const EXP_COEFFICIENTS: [f32; 8] =
    [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// e^x within 1 unit in the last place or so; 0 below -87.3, infinite above 88.3, NaN for NaN.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // The bounds come first so that a NaN passes through.
    let bounded = s.max(s.splat(EXP_LOW), s.min(s.splat(EXP_HIGH), x));
    let result = exp_bounded(s, bounded);
    let result = s.select_lt(x, s.splat(EXP_LOW), s.zero(), result);
    s.select_lt(s.splat(EXP_HIGH), x, s.splat(f32::INFINITY), result)
}

/// e^x for x of zero and less, in fewer instructions: what is below e^-87.3 comes out as that, which
/// vanishes beside the e^0 that every softmax has. NaN for NaN.
#[inline(always)]
pub fn exp_nonpositive<S: Simd>(s: S, x: S::F32) -> S::F32 {
    exp_bounded(s, s.max(s.splat(EXP_LOW), x))
}

/// e^x between the bounds: x = n ln(2) + r, ln(2) in two parts so that r is exact; then 2^n times a
/// polynomial of r.
#[inline(always)]
fn exp_bounded<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut power = s.splat(EXP_COEFFICIENTS[0]);
    for &coefficient in &EXP_COEFFICIENTS[1..] {
        power = s.fma(power, r, s.splat(coefficient));
    }
    let exponent = s.shl_i32::<23>(s.add_i32(s.to_i32(n), s.splat_i32(127)));
    s.mul(power, s.bits_to_f32(exponent))
}

/// x / (1 + e^-x).
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let decay = exp(s, s.sub(s.zero(), x));
    s.div(x, s.add(s.splat(1.0), decay))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, Kernel};
    use crate::cpu::simd::LANES;

    struct Apply<'a>(&'a [f32], bool);

    impl Kernel for Apply<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<f32> {
            let mut out = Vec::new();
            for chunk in self.0.chunks(LANES) {
                let x = s.load_partial(chunk);
                let y = if self.1 { silu(s, x) } else { exp(s, x) };
                out.extend_from_slice(&s.to_array(y)[..chunk.len()]);
            }
            out
        }
    }

    fn inputs() -> Vec<f32> {
        let mut x: Vec<f32> = (-9000..9000).map(|i| i as f32 * 0.01).collect();
        x.extend([0.0, -0.0, 1e-40, -1e-40, 1e-8, f32::MIN, -1e30, f32::NEG_INFINITY]);
        x
    }

    #[test]
    fn exp_and_silu_are_the_same_on_every_instruction_set() {
        let mut x = inputs();
        x.extend([f32::INFINITY, f32::MAX]);
        for silu in [false, true] {
            let expected = Isa::Portable.dispatch(Apply(&x, silu));
            for isa in Isa::available() {
                let actual = isa.dispatch(Apply(&x, silu));
                for ((a, b), x) in actual.iter().zip(&expected).zip(&x) {
                    assert_eq!(a.to_bits(), b.to_bits(), "{isa} {x}");
                }
            }
        }
    }

    #[test]
    fn exp_is_close_to_the_real_one() {
        let x = inputs();
        for (x, y) in x.iter().zip(Isa::Portable.dispatch(Apply(&x, false))) {
            let exact = f64::from(*x).exp();
            let error = (f64::from(y) - exact).abs();
            let in_range = (EXP_LOW..EXP_HIGH).contains(x);
            assert!(!in_range || error <= exact * 2e-7, "{x}: {y} {exact}");
            assert!(*x >= EXP_LOW || y == 0.0, "{x}: {y}");
        }
    }

    #[test]
    fn silu_is_close_to_the_real_one() {
        let x = inputs();
        for (x, y) in x.iter().zip(Isa::Portable.dispatch(Apply(&x, true))) {
            let exact = f64::from(*x) / (1.0 + (-f64::from(*x)).exp());
            let error = (f64::from(y) - exact).abs();
            assert!(!x.is_finite() || error <= exact.abs() * 5e-7 + 1e-36, "{x}: {y} {exact}");
        }
    }

    #[test]
    fn exp_of_zero_and_less_is_exp_but_never_zero() {
        struct Both(f32);
        impl Kernel for Both {
            type Output = [f32; 2];
            #[inline(always)]
            fn run<S: Simd>(self, s: S) -> [f32; 2] {
                let x = s.splat(self.0);
                [s.to_array(exp(s, x))[0], s.to_array(exp_nonpositive(s, x))[0]]
            }
        }
        for isa in Isa::available() {
            for x in inputs().into_iter().filter(|&x| x <= 0.0) {
                let [exact, nonpositive] = isa.dispatch(Both(x));
                let is_tiny = exact == 0.0 && (0.0..1.2e-38).contains(&nonpositive);
                assert!(is_tiny || nonpositive.to_bits() == exact.to_bits(), "{isa} {x}");
            }
            assert!(isa.dispatch(Both(f32::NAN))[1].is_nan());
        }
    }

    #[test]
    fn not_a_number_passes_through() {
        for isa in Isa::available() {
            for silu in [false, true] {
                let y = isa.dispatch(Apply(&[f32::NAN], silu));
                assert!(y[0].is_nan(), "{isa}");
            }
        }
    }
}
