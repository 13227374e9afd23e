//! Bytes of tensors: borrowed from a mapped file, or owned if they were copied, converted or computed.

use crate::failure::{Failure, Result};
use flashtile::Dtype;
use flashtile_bench::elements;
use half::{bf16, f16};
use memmap2::MmapMut;
use rayon::prelude::*;

/// Bytes or elements that a thread copies at once.
const CHUNK: usize = 1 << 16;

/// Owned bytes, initially zero, aligned for every dtype.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// At least one byte.
    memory: MmapMut,
    len: usize,
    is_pool: bool,
}

impl Buffer {
    /// # Errors
    /// If the allocation fails.
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        let memory = MmapMut::map_anon(len.max(1));
        let memory = memory.map_err(|_| Failure::new(format_args!("no memory for {len} bytes")))?;
        Ok(Self { memory, len, is_pool: false })
    }

    /// A buffer for `count` elements in the kind of memory that pools of caches use: huge pages, if the system supports
    /// them.
    pub(crate) fn pool(dtype: Dtype, count: usize) -> Result<Self> {
        Ok(Self::elements(dtype, count)?.into_pool())
    }

    fn into_pool(self) -> Self {
        // Other systems use small pages.
        #[cfg(target_os = "linux")]
        let _ = self.memory.advise(memmap2::Advice::HugePage);
        Self { is_pool: true, ..self }
    }

    /// A buffer for `count` elements.
    pub(crate) fn elements(dtype: Dtype, count: usize) -> Result<Self> {
        let len = count.checked_mul(dtype.bytes());
        Self::zeroed(len.ok_or_else(|| Failure::new(format_args!("{count} elements are not addressable")))?)
    }

    /// A copy in memory of the same kind.
    pub(crate) fn copy(&self) -> Result<Self> {
        let mut buffer = Self::zeroed(self.len)?;
        if self.is_pool {
            buffer = buffer.into_pool();
        }
        // All threads copy, because the system places a page near the thread that touches it first.
        let chunks = buffer.bytes_mut().par_chunks_mut(CHUNK).zip(self.bytes().par_chunks(CHUNK));
        chunks.for_each(|(into, from)| into.copy_from_slice(from));
        Ok(buffer)
    }

    pub(crate) fn copy_of(bytes: &[u8]) -> Result<Self> {
        let mut buffer = Self::zeroed(bytes.len())?;
        buffer.bytes_mut().copy_from_slice(bytes);
        Ok(buffer)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }

    /// The bytes as f32 elements.
    pub(crate) fn floats(&self) -> &[f32] {
        let floats = self.len / size_of::<f32>();
        bytemuck::cast_slice(&self.bytes()[..floats * size_of::<f32>()])
    }

    /// The bytes as f32 elements.
    pub(crate) fn floats_mut(&mut self) -> &mut [f32] {
        let floats = self.len / size_of::<f32>();
        bytemuck::cast_slice_mut(&mut self.bytes_mut()[..floats * size_of::<f32>()])
    }
}

/// Bytes with the alignment of their dtype.
#[derive(Debug)]
pub(crate) enum Bytes<'a> {
    Borrowed(&'a [u8]),
    Owned(Buffer),
}

impl<'a> Bytes<'a> {
    /// Aligns the bytes for elements of `size` bytes: copies them if they are misaligned.
    pub(crate) fn aligned(self, size: usize) -> Result<Self> {
        match self {
            Self::Borrowed(bytes) if !(bytes.as_ptr() as usize).is_multiple_of(size) => {
                Ok(Self::Owned(Buffer::copy_of(bytes)?))
            }
            aligned => Ok(aligned),
        }
    }

    pub(crate) fn get(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(buffer) => buffer.bytes(),
        }
    }
}

/// Converts elements of `from` to the nearest elements of `to`.
pub(crate) fn convert(bytes: &[u8], from: Dtype, to: Dtype) -> Result<Buffer> {
    let mut buffer = Buffer::elements(to, bytes.len() / from.bytes())?;
    elements::convert(from, bytes, to, buffer.bytes_mut());
    Ok(buffer)
}

/// The element at `index`, converted exactly.
pub(crate) fn load(bytes: &[u8], dtype: Dtype, index: usize) -> f32 {
    let at = &bytes[index * dtype.bytes()..][..dtype.bytes()];
    match dtype {
        Dtype::F32 => bytemuck::pod_read_unaligned(at),
        Dtype::F16 => f16::from_bits(bytemuck::pod_read_unaligned(at)).to_f32(),
        Dtype::BF16 => bf16::from_bits(bytemuck::pod_read_unaligned(at)).to_f32(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversion_rounds_to_nearest() {
        let source: Vec<u8> =
            [1.0f32, -0.1, 65504.0, f32::NEG_INFINITY].iter().flat_map(|x| x.to_ne_bytes()).collect();
        let halves = convert(&source, Dtype::F32, Dtype::F16).unwrap();
        let read = |i| load(halves.bytes(), Dtype::F16, i);
        assert_eq!([read(0), read(1), read(2), read(3)], [1.0, -0.099_975_586, 65504.0, f32::NEG_INFINITY]);
        let back = convert(halves.bytes(), Dtype::F16, Dtype::F32).unwrap();
        assert_eq!(load(back.bytes(), Dtype::F32, 1), -0.099_975_586);
    }

    #[test]
    fn misaligned_bytes_are_copied() {
        let words = [0u64, u64::MAX];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        assert!(matches!(Bytes::Borrowed(&bytes[4..8]).aligned(4).unwrap(), Bytes::Borrowed(_)));
        let odd = Bytes::Borrowed(&bytes[7..11]).aligned(4).unwrap();
        assert!(matches!(odd, Bytes::Owned(_)));
        assert_eq!(odd.get(), [0, 255, 255, 255]);
    }

    #[test]
    fn empty_and_impossible_buffers() {
        assert!(Buffer::zeroed(0).unwrap().bytes().is_empty());
        assert!(Buffer::zeroed(usize::MAX / 2).is_err());
        assert!(Buffer::elements(Dtype::F32, usize::MAX).is_err());
    }
}
