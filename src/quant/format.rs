//! Where the bytes of quantized rows lie in a page.
//!
//! A page of one head holds one plane after another, and in a plane the rows of its tokens one after another; the last plane
//! is that of the scales, one f16 a row, little-endian. No byte holds two tokens: rows are appended, copied and dropped by bytes.
//! What leaves a page as a row (a snapshot) is its planes one after another.

use super::planes::{plane_bytes, planes};
use std::ops::Range;

/// Bytes of a scale.
const SCALE: usize = 2;

/// The planes of a quantized row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Format {
    /// Bytes of a row in each plane, the scale last.
    widths: Vec<usize>,
}

impl Format {
    /// Of codes of `bits`, 2 to 6, or 8 for whole bytes.
    pub(crate) fn new(dim: usize, bits: usize) -> Self {
        let mut widths = match bits {
            8 => vec![dim],
            _ => planes(bits).iter().map(|&width| plane_bytes(dim, width)).collect(),
        };
        widths.push(SCALE);
        Self { widths }
    }

    /// Bytes of a row, all planes together.
    pub(crate) fn row_bytes(&self) -> usize {
        self.widths.iter().sum()
    }

    /// Where each plane of rows `rows` is in a page of `page` tokens.
    pub(crate) fn places(&self, page: usize, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        self.widths.iter().scan(0, move |start, width| {
            let at = *start + rows.start * width..*start + rows.end * width;
            *start += page * width;
            Some(at)
        })
    }

    /// Copies a row of a page out, its planes one after another.
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
                let format = Format::new(dim, bits);
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
                let rows: Vec<Vec<u8>> = (0..page)
                    .map(|r| (0..format.row_bytes()).map(|i| (r * 31 + i * 7) as u8).collect())
                    .collect();
                for (row, from) in rows.iter().enumerate() {
                    format.scatter(from, page, row, &mut bytes);
                }
                let mut back = vec![0u8; format.row_bytes()];
                for (row, from) in rows.iter().enumerate() {
                    format.gather(&bytes, page, row, &mut back);
                    assert_eq!(&back, from);
                }
            }
        }
    }

    #[test]
    fn sizes_of_rows() {
        let bytes = |bits| Format::new(128, bits).row_bytes();
        assert_eq!([2, 3, 4, 5, 6, 8].map(bytes), [34, 50, 66, 82, 98, 130]);
    }
}
