//! Root-mean-square normalisation of a row.

use super::simd::{LANES, Simd};

/// x / sqrt(mean(x^2) + eps) * weight, all `[width]` (Zhang and Sennrich 2019, arXiv:1910.07467).
///
/// Squares are summed in 16 lanes and one fixed tree, so a row's result is the same everywhere.
/// Returns whether the row was finite.
#[inline(always)]
pub fn rms_norm<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> bool {
    assert!(x.len() == weight.len() && x.len() == out.len());
    let (x_chunks, x_rest) = x.as_chunks::<LANES>();
    let mut squares = s.zero();
    for chunk in x_chunks {
        let chunk = s.load(chunk);
        squares = s.fma(chunk, chunk, squares);
    }
    let rest = s.load_partial(x_rest);
    squares = s.fma(rest, rest, squares);
    let mean = s.reduce_add(squares) / x.len() as f32;
    let scale = s.splat(1.0 / (mean + eps).sqrt());
    let (weight_chunks, weight_rest) = weight.as_chunks::<LANES>();
    let (out_chunks, out_rest) = out.as_chunks_mut::<LANES>();
    for ((x, weight), out) in x_chunks.iter().zip(weight_chunks).zip(out_chunks) {
        let normed = s.mul(s.load(x), scale);
        s.store(s.mul(normed, s.load(weight)), out);
    }
    s.store_partial(s.mul(s.mul(rest, scale), s.load_partial(weight_rest)), out_rest);
    mean.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, Kernel};

    struct Norm<'a>(&'a [f32], &'a [f32]);

    impl Kernel for Norm<'_> {
        type Output = (Vec<f32>, bool);
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Output {
            let mut out = vec![0.0; self.0.len()];
            let finite = rms_norm(s, self.0, self.1, 1e-5, &mut out);
            (out, finite)
        }
    }

    #[test]
    fn every_instruction_set_gives_the_definition() {
        for width in [1, 15, 16, 37, 576] {
            let x: Vec<f32> = (0..width).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
            let weight: Vec<f32> = (0..width).map(|i| (i as f32 * 0.3).cos()).collect();
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / f64::from(width);
            let (portable, _) = Isa::Portable.dispatch(Norm(&x, &weight));
            for isa in Isa::available() {
                let (out, finite) = isa.dispatch(Norm(&x, &weight));
                assert!(finite);
                assert_eq!(out, portable, "{isa} {width}");
                for ((out, x), weight) in out.iter().zip(&x).zip(&weight) {
                    let exact = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*weight);
                    assert!((f64::from(*out) - exact).abs() < 1e-5, "{isa} {width}");
                }
            }
        }
    }

    #[test]
    fn a_row_that_is_not_finite_is_told() {
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(!Isa::Portable.dispatch(Norm(&[1.0, bad], &[1.0, 1.0])).1);
        }
    }
}
