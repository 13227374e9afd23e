//! The KV cache format of the crate mlx-native (0.15.16), read and written byte for byte.
//!
//! A row of 256 or 512 coordinates has one code per coordinate and one f32 norm per 256 coordinates:
//!
//! ```text
//! y = R x             signs of a fixed table, Walsh-Hadamard transform of the whole row, 1 / sqrt(D); the plain form has y = x
//! D = 256:  n = |y|                  z = 16 y / n           y ~ n / 16 * value[code]
//! D = 512:  n = |y| / 16 of a half   z = y / n              y ~ n * value[code]
//! code = number of edges below z; z = 0 if n <= 1e-10
//! ```
//!
//! Codes of 4 bits are nibbles, the lower one for the even coordinate; codes of 5, 6 and 8 bits are bytes. Keys and
//! values are stored alike: scales are not fitted. Buffers are codes `[slots, kv_heads, capacity, D / 2 or D]` and
//! norms `[slots, kv_heads, capacity, D / 256]`; a page of a head has the codes of its `capacity` rows and then their
//! norms, little-endian.
//!
//! The format follows the crate's sources: tables from `turboquant.rs`, edges and the coding rule from
//! `shaders/hadamard_quantize_kv_fast.metal`, and decoding from `shaders/flash_attn_vec_tq.metal` and `flash_attn_vec_tq_hb.metal` with
//! `scale_factor_d512` = 1, the only value consistent with the tables. GPUs do not guarantee the order in which a norm is summed, so its
//! last bits may differ. The crate's kernels of 5 to 8 bits sum the halves of 512 coordinates in divergent branches; this module sums each
//! branch's own half, as the 4-bit kernel does.

use super::numeric::energy;
use super::rotation::{Rotate, Rotation};

/// Coordinates per norm.
pub(super) const BLOCK: usize = 256;

/// Rows with a norm up to this are stored as zeros.
const MIN_NORM: f32 = 1e-10;

/// Signs of 512 coordinates; 256 coordinates use the first half. Bit `i % 8` of byte `i / 8` is set for -1.
pub const SIGNS: [u8; 64] = [
    0xa7, 0x3b, 0x91, 0xf4, 0x6d, 0xc2, 0x58, 0x0e, 0xb3, 0x7f, 0x24, 0xd6, 0x89, 0x45, 0xea, 0x1c, 0x63,
    0xaf, 0xd8, 0x52, 0x97, 0x0b, 0xe1, 0x3d, 0x76, 0xc4, 0x19, 0xfe, 0x4a, 0x85, 0x2c, 0xdb, 0xd3, 0x4e,
    0xa8, 0x17, 0x9c, 0x5b, 0xe6, 0x31, 0x72, 0xb9, 0x0d, 0xf5, 0x43, 0x8a, 0x6e, 0xc7, 0x58, 0x2f, 0x94,
    0xe1, 0xb6, 0x3d, 0x0a, 0x7c, 0xc5, 0x61, 0xd8, 0x4f, 0xa3, 0x97, 0x1e, 0x85,
];

/// The positive half of the codebook of 4, 5, 6 or 8 bits, and the positive edges between its values, both ascending.
/// The codebook is symmetric and has an edge at 0.
pub const fn tables(bits: usize) -> (&'static [f32], &'static [f32]) {
    match bits {
        4 => (&VALUES4, &EDGES4),
        5 => (&VALUES5, &EDGES5),
        6 => (&VALUES6, &EDGES6),
        _ => (&VALUES8, &EDGES8),
    }
}

/// The value of a code. The lower half of the codebook is negative; bits above the code's are ignored.
pub fn value(bits: usize, code: u8) -> f32 {
    let half = tables(bits).0;
    let code = usize::from(code) % (2 * half.len());
    if code < half.len() { -half[half.len() - 1 - code] } else { half[code - half.len()] }
}

/// Bytes of a row's codes.
pub(super) const fn code_bytes(dim: usize, bits: usize) -> usize {
    if bits == 4 { dim / 2 } else { dim }
}

/// Bytes of a row's norms.
pub(super) const fn norm_bytes(dim: usize) -> usize {
    dim / BLOCK * size_of::<f32>()
}

/// Encoder and decoder of rows of one dimension.
#[derive(Debug, Clone)]
pub(super) struct Mlx {
    bits: usize,
    /// `None` in the plain form.
    pub(super) rotation: Option<Rotation>,
    /// The value of each code before the norm is applied, by byte; by nibble for 4 bits.
    values: Box<[f32; 256]>,
    /// All edges, ascending.
    edges: Vec<f32>,
    /// The sum of squares divided by `squares` is the square of the norm; the norm divided by `root` is the unit of codes.
    squares: f32,
    root: f32,
}

impl Mlx {
    /// For rows of 256 or 512 coordinates.
    pub(super) fn new(dim: usize, bits: usize, rotated: bool) -> Self {
        let sign = |i: usize| if SIGNS[i / 8] >> (i % 8) & 1 == 1 { -1.0 } else { 1.0 };
        let rotation = rotated.then(|| Rotation::with_signs((0..dim).map(sign).collect()));
        let half = tables(bits).1;
        let edges = half.iter().rev().map(|edge| -edge).chain([0.0]).chain(half.iter().copied()).collect();
        let (squares, root) = if dim == BLOCK { (1.0, 16.0) } else { (256.0, 1.0) };
        let mut values = Box::new([0.0; 256]);
        for (code, entry) in (0..=u8::MAX).zip(values.iter_mut()) {
            *entry = value(bits, code);
        }
        Self { bits, rotation, values, edges, squares, root }
    }

    /// Encodes a vector whose elements are finite and whose norm is at most [`MAX_NORM`](super::MAX_NORM). The contents of `x`
    /// are unspecified afterwards.
    #[inline(always)]
    pub(super) fn encode<O: Rotate>(&self, x: &mut [f32], codes: &mut [u8], norms: &mut [u8]) {
        if let Some(rotation) = &self.rotation {
            O::rotate(rotation, x);
        }
        for (x, bytes) in x.chunks_exact_mut(BLOCK).zip(norms.as_chunks_mut().0) {
            let norm = (energy(x) / self.squares).sqrt();
            let factor = if norm > MIN_NORM { 1.0 / norm * self.root } else { 0.0 };
            for x in x {
                *x *= factor;
            }
            *bytes = norm.to_le_bytes();
        }
        if self.bits == 4 {
            for (byte, pair) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
                *byte = self.code(pair[0]) | self.code(pair[1]) << 4;
            }
        } else {
            for (byte, x) in codes.iter_mut().zip(x) {
                *byte = self.code(*x);
            }
        }
    }

    #[inline(always)]
    fn code(&self, z: f32) -> u8 {
        self.edges.partition_point(|edge| *edge < z) as u8
    }

    /// Decodes a row, in the rotated domain if it is rotated.
    #[inline(always)]
    pub(super) fn decode(&self, codes: &[u8], norms: &[u8], x: &mut [f32]) {
        let values = &*self.values;
        if self.bits == 4 {
            for (pair, byte) in x.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                *pair = [values[usize::from(byte & 15)], values[usize::from(byte >> 4)]];
            }
        } else {
            for (x, byte) in x.iter_mut().zip(codes) {
                *x = values[usize::from(*byte)];
            }
        }
        for (x, bytes) in x.chunks_exact_mut(BLOCK).zip(norms.as_chunks().0) {
            let factor = f32::from_le_bytes(*bytes) / self.root;
            for x in x {
                *x *= factor;
            }
        }
    }
}

// The values are the crate's, to its seven decimals. They cannot be recomputed: the tables of 5, 6 and 8 bits come
// from an iteration that stopped before its fixed point (at 8 bits the mean square error is 1.52 times the minimum), and the edges are
// midpoints of values with more decimals than these.

const VALUES4: [f32; 8] =
    [0.128395, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325895];

const EDGES4: [f32; 7] = [0.2582217, 0.5224037, 0.7995498, 1.0992858, 1.4371388, 1.8435318, 2.4008033];

const VALUES5: [f32; 16] = [
    0.0658849, 0.1980377, 0.331355, 0.4666676, 0.6048936, 0.7470884, 0.8945114, 1.0487242, 1.211741,
    1.3862739, 1.57616, 1.7871646, 2.0286608, 2.3176744, 2.6910589, 3.260679,
];

const EDGES5: [f32; 15] = [
    0.1319613, 0.2646964, 0.3990113, 0.5357806, 0.675991, 0.8207999, 0.9716178, 1.1302326, 1.2990074,
    1.4812169, 1.6816622, 1.9079127, 2.1731675, 2.5043666, 2.975869,
];

const VALUES6: [f32; 32] = [
    0.0311537, 0.0935225, 0.1560761, 0.2189392, 0.2822386, 0.3461048, 0.4106724, 0.4760822, 0.5424819,
    0.6100285, 0.6788902, 0.7492492, 0.8213046, 0.8952766, 0.9714118, 1.0499889, 1.1313277, 1.2157998,
    1.3038428, 1.3959804, 1.4928497, 1.5952401, 1.7041502, 1.8208742, 1.9471374, 2.0853193, 2.2388463,
    2.4129324, 2.6161277, 2.8640625, 3.1907215, 3.6996162,
];

const EDGES6: [f32; 31] = [
    0.0623381, 0.1247993, 0.1875076, 0.2505889, 0.3141717, 0.3783886, 0.4433773, 0.509282, 0.5762552,
    0.6444593, 0.7140697, 0.7852769, 0.8582906, 0.9333442, 1.0107003, 1.0906583, 1.1735638, 1.2598213,
    1.3499116, 1.4444151, 1.5440449, 1.6496952, 1.7625122, 1.8840057, 2.0162282, 2.162083, 2.3258893,
    2.51453, 2.7400951, 3.027392, 3.4451687,
];

const VALUES8: [f32; 128] = [
    0.0135717, 0.0407151, 0.0678584, 0.0950019, 0.1221453, 0.1492888, 0.1764324, 0.2035761, 0.2307198,
    0.2578636, 0.2850076, 0.3121517, 0.339296, 0.3664405, 0.3935852, 0.4207301, 0.4478753, 0.4750208,
    0.5021667, 0.5293129, 0.5564596, 0.5836067, 0.6107544, 0.6379027, 0.6650517, 0.6922014, 0.719352,
    0.7465035, 0.7736561, 0.8008098, 0.8279648, 0.8551212, 0.8822793, 0.909439, 0.9366008, 0.9637647,
    0.990931, 1.0180999, 1.0452718, 1.072447, 1.0996255, 1.126808, 1.1539952, 1.1811868, 1.2083838,
    1.2355865, 1.2627956, 1.2900118, 1.3172356, 1.3444678, 1.3717093, 1.398961, 1.4262238, 1.4534986,
    1.4807869, 1.5080897, 1.5354084, 1.5627445, 1.5900996, 1.6174755, 1.6448739, 1.672297, 1.6997468,
    1.7272261, 1.7547373, 1.7822828, 1.8098662, 1.8374904, 1.8651592, 1.8928763, 1.9206458, 1.9484721,
    1.9763603, 2.0043154, 2.032343, 2.0604494, 2.0886407, 2.1169245, 2.145308, 2.1737998, 2.2024086,
    2.231144, 2.2600164, 2.2890372, 2.3182185, 2.3475733, 2.3771157, 2.4068613, 2.436827, 2.4670305,
    2.4974918, 2.528232, 2.559275, 2.5906453, 2.622371, 2.6544826, 2.687013, 2.7199986, 2.7534795, 2.7875,
    2.8221085, 2.8573596, 2.8933132, 2.9300363, 2.967604, 3.0061011, 3.0456228, 3.086278, 3.1281898,
    3.1715012, 3.2163758, 3.2630055, 3.3116157, 3.362473, 3.4158976, 3.4722786, 3.5320935, 3.5959415,
    3.664585, 3.7390194, 3.820578, 3.9111092, 4.0132856, 4.131191, 4.2715507, 4.446719, 4.6836996, 5.065266,
];

const EDGES8: [f32; 127] = [
    0.0271434, 0.0542868, 0.0814302, 0.1085736, 0.1357171, 0.1628606, 0.1900042, 0.2171479, 0.2442917,
    0.2714356, 0.2985797, 0.3257239, 0.3528683, 0.3800128, 0.4071577, 0.4343027, 0.4614481, 0.4885937,
    0.5157398, 0.5428862, 0.5700331, 0.5971806, 0.6243286, 0.6514772, 0.6786266, 0.7057767, 0.7329278,
    0.7600798, 0.7872329, 0.8143873, 0.841543, 0.8687003, 0.8958592, 0.9230199, 0.9501827, 0.9773478,
    1.0045155, 1.031686, 1.0588593, 1.0860362, 1.1132168, 1.1404016, 1.1675909, 1.1947854, 1.2219851,
    1.249191, 1.2764037, 1.3036237, 1.3308517, 1.3580886, 1.3853351, 1.4125923, 1.4398612, 1.4671427,
    1.4944383, 1.521749, 1.5490764, 1.5764221, 1.6037875, 1.6311747, 1.6585855, 1.686022, 1.7134866,
    1.7409817, 1.76851, 1.7960745, 1.8236783, 1.8513248, 1.8790177, 1.906761, 1.934559, 1.9624162, 1.9903378,
    2.0183291, 2.0463963, 2.074545, 2.1027825, 2.1311164, 2.159554, 2.1881042, 2.2167764, 2.2455802,
    2.2745268, 2.3036277, 2.3328958, 2.3623445, 2.3919885, 2.4218442, 2.4519289, 2.4822612, 2.512862,
    2.5437534, 2.57496, 2.606508, 2.6384268, 2.6707478, 2.7035058, 2.736739, 2.7704897, 2.804804, 2.839734,
    2.8753364, 2.9116745, 2.94882, 2.9868524, 3.025862, 3.0659504, 3.107234, 3.1498456, 3.1939385, 3.2396908,
    3.2873106, 3.3370442, 3.3891852, 3.444088, 3.502186, 3.5640175, 3.6302633, 3.7018023, 3.7797987,
    3.8658435, 3.9621973, 4.072238, 4.2013707, 4.359135, 4.5652094, 4.8744826,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::tq::lloyd;

    /// FNV-1a of the bits of the values, little-endian.
    fn digest(values: impl Iterator<Item = f32>) -> u64 {
        values.flat_map(f32::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    #[test]
    fn tables_are_those_of_the_crate() {
        // Digests of the tables in the crate's source: all values and all edges.
        for (bits, values, edges) in [
            (4, 0x8401_277d_f1b0_2a9d, 0xadef_857d_a647_8529),
            (5, 0xc243_f0b8_a425_f271, 0xf6de_e52f_128c_d5d9),
            (6, 0x56c5_0762_cf79_e16d, 0x45e4_fa5a_6349_9905),
            (8, 0x5bf3_9072_9ece_2d79, 0xcfa9_941e_2a11_4211),
        ] {
            let mlx = Mlx::new(256, bits, true);
            assert_eq!(mlx.edges.len() + 1, 1 << bits);
            assert_eq!(
                digest((0..=(mlx.edges.len() as u8)).map(|code| value(mlx.bits, code))),
                values,
                "{bits} bits"
            );
            assert_eq!(digest(mlx.edges.iter().copied()), edges, "{bits} bits");
            // Each value lies in its cell.
            for (at, edge) in mlx.edges.iter().enumerate() {
                let middle = (value(mlx.bits, at as u8) + value(mlx.bits, at as u8 + 1)) / 2.0;
                assert!((edge - middle).abs() < 5e-7, "{bits} bits: {edge} {middle}");
            }
        }
    }

    #[test]
    fn the_table_of_4_bits_alone_is_that_of_the_solver() {
        let rounded = |x: &f64| ((x * 1e7).round() / 1e7) as f32;
        let matches = |bits| lloyd::half(bits).iter().map(rounded).eq(tables(bits).0.iter().copied());
        assert_eq!([4, 5, 6].map(matches), [true, false, false]);
    }
}
