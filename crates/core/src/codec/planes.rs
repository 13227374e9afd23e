//! Bit planes of the codes of a vector.
//!
//! A code of `b` bits is a sign and the index of a magnitude. It is split into planes of 4, 2 and 1 bits, with the
//! sign in the highest bit of the last: 2 = 2, 3 = 2 + 1, 4 = 4, 5 = 4 + 1, 6 = 4 + 2. A vector is split into blocks
//! of 128 coordinates and a last block with the rest. In a block of `n`, with `m = ceil(n / 2)` or `ceil(n / 4)`:
//!
//! ```text
//! plane of b bits: byte j has coordinates j, j + m, j + 2 m, ... in its bits, lowest first       (m = ceil(n b / 8) bytes)
//! ```
//!
//! Shifts and masks alone then split a register of bytes into registers of neighbouring coordinates, whether its bytes belong to one token
//! or to several. Bits of missing coordinates are 0.

/// Coordinates per block.
const BLOCK: usize = 128;

/// Number of bits in each plane of codes of 2 to 6 bits, starting with the plane of the lowest bits.
pub(crate) const fn planes(bits: usize) -> &'static [usize] {
    match bits {
        2 => &[2],
        3 => &[2, 1],
        4 => &[4],
        5 => &[4, 1],
        _ => &[4, 2],
    }
}

/// Bytes of a plane of `bits` bits of a vector.
pub(crate) const fn plane_bytes(dim: usize, bits: usize) -> usize {
    dim / BLOCK * (BLOCK * bits / 8) + (dim % BLOCK * bits).div_ceil(8)
}

/// Writes a plane of codes: `bits` bits of each from bit `from` on, or whole bytes.
#[inline(always)]
pub(crate) fn pack(codes: &[u8], from: usize, bits: usize, plane: &mut [u8]) {
    match bits {
        8 => plane.copy_from_slice(codes),
        4 => pack_bits::<4>(codes, from, plane),
        2 => pack_bits::<2>(codes, from, plane),
        _ => pack_bits::<1>(codes, from, plane),
    }
}

/// [`pack`] for less than whole bytes. Loops over whole blocks have a constant length.
#[inline(always)]
fn pack_bits<const BITS: usize>(codes: &[u8], from: usize, plane: &mut [u8]) {
    let (blocks, rest) = codes.as_chunks::<BLOCK>();
    let (bytes, rest_bytes) = plane.split_at_mut(blocks.len() * (BLOCK * BITS / 8));
    for (codes, bytes) in blocks.iter().zip(bytes.chunks_exact_mut(BLOCK * BITS / 8)) {
        pack_block::<BITS>(codes, from, BLOCK * BITS / 8, bytes);
    }
    pack_block::<BITS>(rest, from, (rest.len() * BITS).div_ceil(8), rest_bytes);
}

/// Packs one block, whose plane has `m` bytes.
#[inline(always)]
fn pack_block<const BITS: usize>(codes: &[u8], from: usize, m: usize, bytes: &mut [u8]) {
    let bytes = &mut bytes[..m];
    bytes.fill(0);
    for part in 0..8 / BITS {
        let codes = &codes[codes.len().min(part * m)..codes.len().min((part + 1) * m)];
        for (byte, code) in bytes.iter_mut().zip(codes) {
            *byte |= (code >> from & ((1 << BITS) - 1)) << (part * BITS);
        }
    }
}

/// Reads a plane. The plane of the lowest bits replaces the codes; other planes add their bits.
#[inline(always)]
pub(crate) fn unpack(plane: &[u8], from: usize, bits: usize, codes: &mut [u8]) {
    match bits {
        8 => codes.copy_from_slice(plane),
        4 => unpack_bits::<4>(plane, from, codes),
        2 => unpack_bits::<2>(plane, from, codes),
        _ => unpack_bits::<1>(plane, from, codes),
    }
}

/// [`unpack`] for less than whole bytes.
#[inline(always)]
fn unpack_bits<const BITS: usize>(plane: &[u8], from: usize, codes: &mut [u8]) {
    if from == 0 {
        codes.fill(0);
    }
    let (blocks, rest) = codes.as_chunks_mut::<BLOCK>();
    let (bytes, rest_bytes) = plane.split_at(blocks.len() * (BLOCK * BITS / 8));
    for (codes, bytes) in blocks.iter_mut().zip(bytes.chunks_exact(BLOCK * BITS / 8)) {
        unpack_block::<BITS>(bytes, from, BLOCK * BITS / 8, codes);
    }
    let m = (rest.len() * BITS).div_ceil(8);
    unpack_block::<BITS>(rest_bytes, from, m, rest);
}

/// Unpacks one block, whose plane has `m` bytes.
#[inline(always)]
fn unpack_block<const BITS: usize>(bytes: &[u8], from: usize, m: usize, codes: &mut [u8]) {
    let (bytes, n) = (&bytes[..m], codes.len());
    for part in 0..8 / BITS {
        let codes = &mut codes[n.min(part * m)..n.min((part + 1) * m)];
        for (code, byte) in codes.iter_mut().zip(bytes) {
            *code |= (byte >> (part * BITS) & ((1 << BITS) - 1)) << from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Byte and shift of a coordinate's bits.
    const fn place(dim: usize, bits: usize, i: usize) -> (usize, usize) {
        let (block, i) = (i / BLOCK, i % BLOCK);
        let rest = dim - block * BLOCK;
        let n = if rest < BLOCK { rest } else { BLOCK };
        let first = block * (BLOCK * bits / 8);
        let m = n.div_ceil(8 / bits);
        (first + i % m, i / m * bits)
    }

    #[test]
    fn codes_come_back_and_take_the_bytes_of_their_bits() {
        for bits in 2..=6 {
            assert_eq!(planes(bits).iter().sum::<usize>(), bits);
            for dim in [1, 7, 33, 64, 80, 96, 127, 128, 129, 192, 256, 300, 512] {
                let codes: Vec<u8> = (0..dim).map(|i| (i * 37 + i / 5) as u8 & ((1 << bits) - 1)).collect();
                let mut back = vec![0xAA; dim];
                let (mut from, mut total) = (0, 0);
                for &width in planes(bits) {
                    let mut plane = vec![0xAA; plane_bytes(dim, width)];
                    pack(&codes, from, width, &mut plane);
                    unpack(&plane, from, width, &mut back);
                    (from, total) = (from + width, total + plane.len());
                }
                assert_eq!(codes, back, "{bits} bits, {dim}");
                assert!(
                    total * 8 >= dim * bits && total <= (dim * bits).div_ceil(8) + 1,
                    "{bits} {dim}: {total}"
                );
            }
        }
        let bytes = |bits| planes(bits).iter().map(|&w| plane_bytes(128, w)).sum::<usize>() + 2;
        assert_eq!([2, 3, 4, 5, 6].map(bytes), [34, 50, 66, 82, 98]);
    }

    #[test]
    fn places_are_those_of_the_format() {
        for bits in [1, 2, 4] {
            for dim in [33, 64, 80, 128, 300] {
                for i in 0..dim {
                    let mut codes = vec![0u8; dim];
                    codes[i] = (1 << bits) - 1;
                    let mut plane = vec![0u8; plane_bytes(dim, bits)];
                    pack(&codes, 0, bits, &mut plane);
                    let (byte, shift) = place(dim, bits, i);
                    let mut want = vec![0u8; plane.len()];
                    want[byte] = codes[i] << shift;
                    assert_eq!(plane, want, "{bits} bits, {dim}, {i}");
                }
            }
        }
        assert_eq!(place(128, 4, 5), (5, 0));
        assert_eq!(place(128, 4, 69), (5, 4));
        assert_eq!(place(128, 2, 100), (4, 6));
        assert_eq!(place(128, 1, 19), (3, 1));
        assert_eq!(place(64, 1, 19), (3, 2));
        assert_eq!(place(256, 4, 128), (64, 0));
        assert_eq!(place(160, 4, 145), (65, 4));
    }
}
