//! Integer codebooks: the Lloyd-Max tables times a factor, rounded.
//!
//! Products with codes are then exact integers. The best factors make the inner steps of a table, which are nearly
//! equal, close to integers: the mean square error grows by 0.1 % at 4 bits, 0.5 % at 5 and 2.4 % at 6. A factor that
//! makes the outermost value 127 costs 0.2, 1.1 and 6.0 %.

use super::lloyd;

/// Number of scales that the encoder tries for a vector.
pub(in crate::codec) const TRIALS: usize = 8;

/// Factors of the tables of 2 to 6 bits.
pub(in crate::codec) const FACTORS: [f64; 5] = [84.1, 45.3, 45.2, 29.0, 28.8];

/// The codebook of codes of `bits` bits: bit `bits - 1` is the sign, the others are the index of the magnitude.
#[derive(Debug, PartialEq)]
pub(in crate::codec) struct Codebook {
    pub(in crate::codec) bits: usize,
    /// Magnitudes in ascending order; the first `count` are used.
    half: [u8; 32],
    count: usize,
    /// Magnitude and index of the level nearest to each number of half-levels. A tie goes to the larger level.
    pub(in crate::codec) nearest_of: [u8; 256],
    pub(in crate::codec) index_of: [u8; 256],
    /// The signed level of each code; bits above a code's are ignored.
    pub(in crate::codec) signed: [i8; 64],
}

static CODEBOOKS: [Codebook; 5] =
    [Codebook::new(2), Codebook::new(3), Codebook::new(4), Codebook::new(5), Codebook::new(6)];

impl Codebook {
    const fn new(bits: usize) -> Self {
        let (count, mut half, mut signed) = (1 << (bits - 1), [0u8; 32], [0i8; 64]);
        let mut n = 0;
        while n < count {
            half[n] = (lloyd::half(bits)[n] * FACTORS[bits - 2] + 0.5) as u8;
            n += 1;
        }
        let mut code = 0;
        while code < 64 {
            let level = half[code % count] as i8;
            signed[code] = if code >> (bits - 1) & 1 == 1 { -level } else { level };
            code += 1;
        }
        let (mut nearest_of, mut index_of) = ([0u8; 256], [0u8; 256]);
        let (mut number, mut index) = (0, 0);
        while number < 256 {
            if index + 1 < count && number >= half[index] as usize + half[index + 1] as usize {
                index += 1;
            }
            (nearest_of[number], index_of[number]) = (half[index], index as u8);
            number += 1;
        }
        Self { bits, half, count, nearest_of, index_of, signed }
    }

    const fn half(&self) -> &[u8] {
        self.half.split_at(self.count).0
    }

    /// The codebook of 2 to 6 bits.
    pub(in crate::codec) fn of(bits: usize) -> &'static Self {
        &CODEBOOKS[bits - 2]
    }

    /// The level nearest to each number of half-levels. A tie goes to the larger level.
    #[inline(always)]
    pub(in crate::codec) fn nearest(&self, halves: &[u8], levels: &mut [u8]) {
        levels.fill(self.half[0]);
        for pair in self.half().windows(2) {
            let (edge, step) = (pair[0] + pair[1], pair[1] - pair[0]);
            for (level, half) in levels.iter_mut().zip(halves) {
                *level += if *half >= edge { step } else { 0 };
            }
        }
    }

    /// The index of the level nearest to each number of half-levels.
    #[inline(always)]
    pub(in crate::codec) fn indices(&self, halves: &[u8], indices: &mut [u8]) {
        indices.fill(0);
        for pair in self.half().windows(2) {
            let edge = pair[0] + pair[1];
            for (index, half) in indices.iter_mut().zip(halves) {
                *index += u8::from(*half >= edge);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_of_the_formats() {
        let half = |bits| Codebook::of(bits).half();
        assert_eq!(half(2), [38, 127]);
        assert_eq!(half(3), [11, 34, 61, 97]);
        assert_eq!(half(4), [6, 18, 30, 43, 57, 73, 94, 124]);
        assert_eq!(half(5), [2, 6, 10, 14, 18, 22, 26, 30, 35, 40, 46, 52, 59, 67, 78, 95]);
        assert_eq!(half(6)[..16], [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 30, 32]);
        assert_eq!(half(6)[16..], [34, 37, 39, 42, 45, 48, 51, 54, 58, 62, 66, 71, 77, 84, 93, 108]);
        // Edges, in half-levels, fit in a byte.
        assert!((2..=6).all(|bits| half(bits).windows(2).all(|pair| pair[0].checked_add(pair[1]).is_some())));
    }

    #[test]
    fn numbers_go_to_the_nearest_level() {
        for bits in 2..=6 {
            let levels = Codebook::of(bits);
            let halves: Vec<u8> = (0..=255).collect();
            let (mut nearest, mut indices) = (vec![0u8; 256], vec![0u8; 256]);
            levels.nearest(&halves, &mut nearest);
            levels.indices(&halves, &mut indices);
            for half in 0..256 {
                let distance = |level: u8| (2 * i32::from(level) - half as i32).abs();
                let min = levels.half().iter().map(|&level| distance(level)).min().unwrap();
                assert_eq!(distance(nearest[half]), min, "{bits} bits, {half}");
                assert_eq!(levels.half[usize::from(indices[half])], nearest[half]);
                assert_eq!((levels.nearest_of[half], levels.index_of[half]), (nearest[half], indices[half]));
                assert_eq!(levels.signed[usize::from(indices[half])], nearest[half] as i8);
                let negative = indices[half] | 1 << (bits - 1);
                assert_eq!(levels.signed[usize::from(negative)], -(nearest[half] as i8));
            }
        }
    }
}
