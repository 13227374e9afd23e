//! Layout of quantized rows in a page.
//!
//! A page of one head stores one plane after another, and in each plane the rows of its tokens one after another. The last plane has the
//! scales, little-endian: one f16 per row, except in foreign formats. Two tokens never share a byte, so rows are appended, copied and
//! dropped as bytes. Outside a page, as in a snapshot, a row is its planes one after another.

use super::planes::{self, plane_bytes, planes};
use half::f16;
use std::ops::Range;

/// Bytes of a row's scale.
const SCALE: usize = 2;

/// A code stands for its level times the stored scale, divided by this constant.
pub const SCALE_UNIT: f32 = 128.0;

/// Like [`SCALE_UNIT`], for e4m3 codes.
pub const FP8_SCALE_UNIT: f32 = 256.0;

/// The scale of a row. Scales are never negative; the sign bit is ignored.
#[inline(always)]
pub(super) fn scale(bytes: &[u8]) -> f16 {
    f16::from_le_bytes([bytes[0], bytes[1] & 0x7f])
}

/// A plane of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plane {
    /// Bytes per row.
    pub bytes: usize,
    /// Bits of each code in the plane.
    pub bits: usize,
    /// Position of the lowest of these bits in the code.
    pub(crate) from: usize,
}

/// The planes of a quantized row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowLayout {
    dim: usize,
    planes: [Plane; 2],
    count: usize,
    /// Bytes per row of the last plane.
    scale: usize,
}

impl RowLayout {
    /// The layout for codes of 2 to 6 bits, or whole bytes for 8.
    pub fn new(dim: usize, bits: usize) -> Self {
        let mut planes_of = [Plane { bytes: dim, bits: 8, from: 0 }; 2];
        let widths = if bits == 8 { &[8][..] } else { planes(bits) };
        let mut from = 0;
        for (plane, &width) in planes_of.iter_mut().zip(widths) {
            *plane = Plane { bytes: plane_bytes(dim, width), bits: width, from };
            from += width;
        }
        Self { dim, planes: planes_of, count: widths.len(), scale: SCALE }
    }

    /// A layout of one plane with `codes` bytes per row, and scales of `scale` bytes per row.
    pub(super) const fn opaque(dim: usize, codes: usize, scale: usize) -> Self {
        Self { dim, planes: [Plane { bytes: codes, bits: 8, from: 0 }; 2], count: 1, scale }
    }

    /// Bytes per row; saturating.
    pub(crate) const fn bytes(dim: usize, bits: usize) -> usize {
        if bits == 8 {
            return dim.saturating_add(SCALE);
        }
        let (widths, mut bytes, mut n) = (planes(bits), SCALE, 0);
        while n < widths.len() {
            bytes += plane_bytes(dim, widths[n]);
            n += 1;
        }
        bytes
    }

    /// Elements per row.
    #[cfg(any(test, target_arch = "x86_64"))]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// The planes of codes.
    pub fn planes(&self) -> &[Plane] {
        &self.planes[..self.count]
    }

    /// Bytes per row of each plane, the scale last.
    fn widths(&self) -> impl Iterator<Item = usize> + '_ {
        self.planes().iter().map(|plane| plane.bytes).chain([self.scale])
    }

    /// Bytes per row, all planes together.
    pub fn row_bytes(&self) -> usize {
        self.widths().sum()
    }

    /// The byte ranges of rows `rows` in a page of `page` tokens: one per plane, the scales last.
    pub fn places(&self, page: usize, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        self.widths().scan(0, move |start, width| {
            let at = *start + rows.start * width..*start + rows.end * width;
            *start += page * width;
            Some(at)
        })
    }

    /// The byte ranges of codes and scale of a row in a page, for a layout with one plane.
    #[inline(always)]
    pub(super) fn row(&self, page: usize, row: usize) -> [Range<usize>; 2] {
        let codes = self.planes[0].bytes;
        let scales = page * codes;
        [row * codes..(row + 1) * codes, scales + row * self.scale..scales + (row + 1) * self.scale]
    }

    /// Stores codes and scale as a row of a page.
    #[inline(always)]
    pub(crate) fn write(&self, codes: &[u8], scale: f16, page: &mut [u8], tokens: usize, row: usize) {
        let mut start = 0;
        for plane in self.planes() {
            let at = start + row * plane.bytes;
            planes::pack(&codes[..self.dim], plane.from, plane.bits, &mut page[at..at + plane.bytes]);
            start += tokens * plane.bytes;
        }
        page[start + row * SCALE..][..SCALE].copy_from_slice(&scale.to_le_bytes());
    }

    /// Reads the codes of a row of a page and returns its scale.
    #[inline(always)]
    pub(crate) fn read(&self, page: &[u8], tokens: usize, row: usize, codes: &mut [u8]) -> f16 {
        let mut start = 0;
        for plane in self.planes() {
            let at = start + row * plane.bytes;
            planes::unpack(&page[at..at + plane.bytes], plane.from, plane.bits, &mut codes[..self.dim]);
            start += tokens * plane.bytes;
        }
        scale(&page[start + row * SCALE..][..SCALE])
    }

    /// Copies a row out of a page, its planes one after another.
    pub(crate) fn gather(&self, bytes: &[u8], page: usize, row: usize, into: &mut [u8]) {
        let mut at = 0;
        for place in self.places(page, row..row + 1) {
            into[at..][..place.len()].copy_from_slice(&bytes[place.clone()]);
            at += place.len();
        }
    }

    /// Copies a row into a page.
    pub(crate) fn scatter(&self, row_bytes: &[u8], page: usize, row: usize, bytes: &mut [u8]) {
        let mut at = 0;
        for place in self.places(page, row..row + 1) {
            bytes[place.clone()].copy_from_slice(&row_bytes[at..][..place.len()]);
            at += place.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_do_not_share_bytes_and_fill_the_page() {
        for bits in [2, 3, 4, 5, 6, 8] {
            for (dim, page) in [(128, 64), (96, 16), (33, 3), (80, 1)] {
                let format = RowLayout::new(dim, bits);
                assert_eq!(format.row_bytes(), RowLayout::bytes(dim, bits));
                let mut owner = vec![usize::MAX; page * format.row_bytes()];
                for row in 0..page {
                    for place in format.places(page, row..row + 1) {
                        for byte in place {
                            assert_eq!(owner[byte], usize::MAX, "{bits} bits, {dim}: byte {byte}");
                            owner[byte] = row;
                        }
                    }
                }
                assert!(owner.iter().all(|row| *row < page));
                let mut bytes = vec![0u8; owner.len()];
                let code = |r: usize, i: usize| ((r * 31 + i * 7) & ((1 << bits) - 1)) as u8;
                let scale = |r: usize| f16::from_f32(r as f32 + 0.5);
                for row in 0..page {
                    let codes: Vec<u8> = (0..dim).map(|i| code(row, i)).collect();
                    format.write(&codes, scale(row), &mut bytes, page, row);
                }
                let mut copied = vec![0u8; bytes.len()];
                let (mut out, mut codes) = (vec![0u8; format.row_bytes()], vec![0u8; dim]);
                for row in 0..page {
                    format.gather(&bytes, page, row, &mut out);
                    format.scatter(&out, page, row, &mut copied);
                    assert_eq!(format.read(&copied, page, row, &mut codes), scale(row));
                    assert!((0..dim).all(|i| codes[i] == code(row, i)), "{bits} bits, {dim}");
                }
                assert_eq!(bytes, copied);
            }
        }
    }

    #[test]
    fn sizes_of_rows() {
        let bytes = |bits| RowLayout::bytes(128, bits);
        assert_eq!([2, 3, 4, 5, 6, 8].map(bytes), [34, 50, 66, 82, 98, 130]);
    }
}
