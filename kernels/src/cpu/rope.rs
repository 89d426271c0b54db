//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864) by tables that are fixed at load.

/// Cosines and sines of the pairs `(i, i + head_dim / 2)` by absolute position.
#[derive(Debug)]
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Tables for positions below `max_len`, computed in f64: angle `position * theta^(-2i / head_dim)`.
    pub fn new(max_len: usize, head_dim: usize, theta: f64) -> Self {
        let half = head_dim / 2;
        let frequencies: Vec<f64> =
            (0..half).map(|pair| theta.powf(-((2 * pair) as f64) / head_dim as f64)).collect();
        let angles =
            || (0..max_len).flat_map(|position| frequencies.iter().map(move |f| position as f64 * f));
        Self {
            half,
            cos: angles().map(|angle| angle.cos() as f32).collect(),
            sin: angles().map(|angle| angle.sin() as f32).collect(),
        }
    }

    /// Positions of the tables.
    pub fn max_len(&self) -> usize {
        self.cos.len() / self.half.max(1)
    }

    /// Rotate each head of `heads`, `[num_heads * head_dim]`, in place.
    ///
    /// Two products and one sum per number, never fused, so every instruction set agrees.
    #[inline(always)]
    pub fn rotate(&self, position: usize, heads: &mut [f32]) {
        let cos = &self.cos[position * self.half..][..self.half];
        let sin = &self.sin[position * self.half..][..self.half];
        for head in heads.chunks_exact_mut(2 * self.half) {
            let (first, second) = head.split_at_mut(self.half);
            for (((x, y), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_keeps_lengths_and_depends_on_distance_alone() {
        let table = RopeTable::new(64, 8, 10_000.0);
        let (q, k) =
            ([0.3, -1.0, 2.0, 0.5, 1.5, 0.25, -0.75, 1.0], [1.0, 0.5, -0.5, 2.0, 0.1, 0.2, 0.3, 0.4]);
        let dot_at = |q_position, k_position| {
            let (mut q, mut k) = (q, k);
            table.rotate(q_position, &mut q);
            table.rotate(k_position, &mut k);
            q.iter().zip(&k).map(|(q, k)| q * k).sum::<f32>()
        };
        let plain: f32 = q.iter().zip(&k).map(|(q, k)| q * k).sum();
        assert!((dot_at(5, 5) - plain).abs() < 1e-5);
        assert!((dot_at(40, 33) - dot_at(9, 2)).abs() < 1e-5);
        assert!((dot_at(40, 33) - plain).abs() > 1e-2);
    }

    #[test]
    fn position_zero_changes_nothing() {
        let table = RopeTable::new(1, 4, 10_000.0);
        let mut head = [1.0, 2.0, 3.0, 4.0];
        table.rotate(0, &mut head);
        assert_eq!(head.map(f32::to_bits), [1.0f32, 2.0, 3.0, 4.0].map(f32::to_bits));
        assert_eq!(table.max_len(), 1);
    }
}
