//! The contents of a sequence, independent of the cache that they came from.

use super::desc::{CacheDesc, CacheLayout, CacheShape};
use super::error::CacheError;
use super::key_error::KeyTransformError;
use super::table::reserve;
use crate::codec::{Codec, KeyTransform};
use crate::limits::MAX_LEN;
use crate::problem::KvStorage;
use std::ops::Range;

/// The first bytes of a snapshot: magic, version, and the byte order of the machine that wrote it.
const MAGIC: [u8; 8] = *b"ftkvsnap";
const VERSION: u32 = 1;
/// The version of a snapshot whose rows are followed by tokens that were kept in 16 bits.
const VERSION_WITH_KEPT: u32 = 2;
const ORDER: u32 = 0x0102_0304;

/// Stands for the codec of values that are columns of the keys.
const KEY_COLUMNS: &str = "key_columns";

/// Bytes of a codec's name, padded with zeros.
const NAME: usize = 16;

/// Bits of a layer's flag.
const HAS_MEAN: u8 = 1;
const HAS_FACTORS: u8 = 2;

/// Bytes before the flags of layers: the magic, six integers of 8 bytes, two names.
const HEADER: usize = 16 + 6 * 8 + 2 * NAME;

/// Splits off the first `n` bytes; `None` if there are fewer.
fn take<'b>(rest: &mut &'b [u8], count: usize) -> Option<&'b [u8]> {
    let (first, after) = rest.split_at_checked(count)?;
    *rest = after;
    Some(first)
}

/// The transforms of the layers, whose parts the flags name.
fn read_transforms(
    desc: &CacheDesc,
    flags: &[u8],
    rest: &mut &[u8],
) -> Result<Vec<KeyTransform>, CacheError> {
    let list_bytes = desc.kv_heads * desc.head_dim * size_of::<f32>();
    let mut transforms: Vec<KeyTransform> = Vec::new();
    reserve(&mut transforms, flags.len())?;
    for flag in flags {
        let mut list = |bit: u8| -> Option<Vec<f32>> {
            let bytes = (flag & bit != 0).then(|| take(rest, list_bytes).unwrap_or_default())?;
            Some(bytes.as_chunks().0.iter().map(|x| f32::from_ne_bytes(*x)).collect())
        };
        let (mean, factors) = (list(HAS_MEAN), list(HAS_FACTORS));
        mean.as_deref().map_or(Ok(()), |mean| desc.check_key_mean(mean))?;
        factors.as_deref().map_or(Ok(()), |factors| desc.check_key_factors(factors))?;
        transforms.push(KeyTransform::new(mean, factors));
    }
    Ok(transforms)
}

/// The snapshots of the tokens that were kept in 16 bits, from the last bytes of a snapshot of `got` bytes.
fn read_parts(bytes: &[u8], got: usize) -> Result<[Option<Box<Snapshot>>; 2], CacheError> {
    let mut rest = bytes;
    let mut part = || {
        let at = got - rest.len();
        let length = |more: usize| CacheError::SnapshotLength { expected: at.saturating_add(more), got };
        let size = take(&mut rest, size_of::<u64>()).and_then(|size| size.try_into().ok());
        let size = u64::from_ne_bytes(size.ok_or(length(size_of::<u64>()))?);
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let bytes = take(&mut rest, size).ok_or(length(size.saturating_add(size_of::<u64>())))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        Snapshot::read(bytes, false).map(|part| Some(Box::new(part)))
    };
    let parts = [part()?, part()?];
    if rest.is_empty() {
        Ok(parts)
    } else {
        Err(CacheError::SnapshotLength { expected: got - rest.len(), got })
    }
}

/// The kept tokens of a sequence in every layer, as owned bytes: stored rows without conversion. It can be restored
/// into any cache with the same layers, heads, dimensions, codecs, key means and key factors, whatever its layout.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Dimensions and codecs of the rows; the layout does not matter.
    pub(super) desc: CacheDesc,
    pub(super) kept: Range<usize>,
    /// `[layers]` of K `[kv_heads, kept, row]` and, where values have rows of their own, V `[kv_heads, kept, row]`.
    pub(super) bytes: Vec<u8>,
    /// `[layers]`: transforms of the keys before they were encoded.
    pub(super) transforms: Vec<KeyTransform>,
    /// The first and the last tokens that were kept in 16 bits.
    pub(super) parts: [Option<Box<Snapshot>>; 2],
}

impl Snapshot {
    /// Length of the sequence, including tokens that were no longer kept.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.kept.end
    }

    /// Returns true if the sequence had no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.kept.end == 0
    }

    /// First token that was kept.
    #[must_use]
    pub const fn first(&self) -> usize {
        self.kept.start
    }

    /// Bytes of the kept tokens: [`CacheDesc::token_bytes`] for each.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The kept rows: `[layers]` of K `[kv_heads, kept, row]` and, where values have rows of their own, V `[kv_heads, kept, row]`, each
    /// row in its codec's format.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The mean `[kv_heads, head_dim]` that was subtracted from the keys of a layer, if there was one. A new
    /// cache needs it by [`KvCache::set_key_mean`](super::KvCache::set_key_mean) before the snapshot is
    /// restored into it.
    ///
    /// # Errors
    /// [`CacheError::Layer`].
    pub fn key_mean(&self, layer: usize) -> Result<Option<&[f32]>, CacheError> {
        self.desc.check_layer(layer)?;
        Ok(self.transforms[layer].mean())
    }

    /// The factors `[kv_heads, head_dim]` that the keys of a layer were divided by, if there were any. A new cache needs them by
    /// [`KvCache::set_key_factors`](super::KvCache::set_key_factors) before the snapshot is restored into it.
    ///
    /// # Errors
    /// [`CacheError::Layer`].
    pub fn key_factors(&self, layer: usize) -> Result<Option<&[f32]>, CacheError> {
        self.desc.check_layer(layer)?;
        Ok(self.transforms[layer].factors())
    }

    /// Lists of the transforms: of each layer the mean, then the factors.
    fn lists(&self) -> impl Iterator<Item = &[f32]> {
        self.transforms.iter().flat_map(|of| [of.mean(), of.factors()]).flatten()
    }

    /// The snapshot as bytes to store or send: a header of 96 bytes; a byte per layer, whose bit 0 is set if its keys have a mean, and
    /// bit 1 if they have factors; mean and factors of each layer as f32; and the rows of [`Snapshot::as_bytes`]. Where tokens were
    /// kept in 16 bits, the first and the last of them follow: for each a number of bytes, which may be 0, and as many bytes, a snapshot
    /// of their own. Integers and floats are in native byte order.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let desc = &self.desc;
        let mut bytes = Vec::with_capacity(self.header_bytes() + self.bytes.len());
        bytes.extend(MAGIC);
        let has_kept = self.parts.iter().any(Option::is_some);
        let version = if has_kept { VERSION_WITH_KEPT } else { VERSION };
        bytes.extend([version, ORDER].iter().flat_map(|x| x.to_ne_bytes()));
        let fields =
            [desc.layers, desc.kv_heads, desc.head_dim, desc.value_dim, self.kept.start, self.kept.end];
        bytes.extend(fields.iter().flat_map(|x| (*x as u64).to_ne_bytes()));
        let v = match desc.kv_storage {
            KvStorage::Separate => desc.v.name(),
            KvStorage::KeyColumns => KEY_COLUMNS,
        };
        for name in [desc.k.name(), v] {
            let name = name.bytes();
            bytes.extend(name.chain(std::iter::repeat(0)).take(NAME));
        }
        let flag = |list: Option<&[f32]>, bit: u8| if list.is_some() { bit } else { 0 };
        bytes.extend(
            self.transforms.iter().map(|of| flag(of.mean(), HAS_MEAN) | flag(of.factors(), HAS_FACTORS)),
        );
        bytes.extend(self.lists().flatten().flat_map(|x| x.to_ne_bytes()));
        bytes.extend(&self.bytes);
        if has_kept {
            for part in self.parts() {
                let part = part.map_or_else(Vec::new, Self::to_bytes);
                bytes.extend((part.len() as u64).to_ne_bytes());
                bytes.extend(part);
            }
        }
        bytes
    }

    /// The first and the last tokens that were kept in 16 bits.
    pub(super) fn parts(&self) -> [Option<&Self>; 2] {
        self.parts.each_ref().map(Option::as_deref)
    }

    /// Bytes before the rows.
    fn header_bytes(&self) -> usize {
        HEADER + self.transforms.len() + self.lists().map(size_of_val).sum::<usize>()
    }

    /// The inverse of [`Snapshot::to_bytes`]. Everything that a cache relies on is checked. Rows may be any bytes:
    /// those that no encoder wrote decode to meaningless values, in their own tokens only. There is no checksum.
    /// Takes as much memory as the bytes, and a few words per layer.
    ///
    /// # Errors
    /// [`CacheError::SnapshotHeader`], [`CacheError::SnapshotLength`], [`CacheError::SnapshotRange`], [`CacheError::Dimension`],
    /// [`CacheError::KeyColumns`], [`CacheError::CodecDim`], [`CacheError::SizeOverflow`], [`CacheError::KeyTransform`] for a mean or
    /// factors that the keys cannot have, or [`CacheError::Memory`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CacheError> {
        Self::read(bytes, true)
    }

    /// [`Snapshot::from_bytes`]. Kept tokens keep none of their own: their bytes are read without `may_keep`.
    fn read(bytes: &[u8], may_keep: bool) -> Result<Self, CacheError> {
        let got = bytes.len();
        let length = |expected| CacheError::SnapshotLength { expected, got };
        let mut rest = bytes;
        let magic = take(&mut rest, MAGIC.len()).ok_or(length(HEADER))?;
        if magic != MAGIC {
            return Err(CacheError::SnapshotHeader { field: "magic" });
        }
        let version = take(&mut rest, size_of::<u32>()).ok_or(length(HEADER))?;
        let has_kept = may_keep && version == VERSION_WITH_KEPT.to_ne_bytes();
        if !has_kept && version != VERSION.to_ne_bytes() {
            return Err(CacheError::SnapshotHeader { field: "version" });
        }
        if take(&mut rest, size_of::<u32>()).ok_or(length(HEADER))? != ORDER.to_ne_bytes() {
            return Err(CacheError::SnapshotHeader { field: "byte order" });
        }
        let mut field = || {
            let bytes = take(&mut rest, size_of::<u64>())?;
            Some(usize::try_from(u64::from_ne_bytes(bytes.try_into().ok()?)).unwrap_or(usize::MAX))
        };
        let mut fields = [0; 6];
        for value in &mut fields {
            *value = field().ok_or(length(HEADER))?;
        }
        let [layers, kv_heads, head_dim, value_dim, first, end] = fields;
        if first > end || end > MAX_LEN {
            return Err(CacheError::SnapshotRange { first, end, max: MAX_LEN });
        }
        let mut name = || -> Result<&[u8], CacheError> {
            let name = take(&mut rest, NAME).ok_or(length(HEADER))?;
            Ok(name.iter().rposition(|x| *x != 0).map_or(&[][..], |last| &name[..=last]))
        };
        let codec = |name: &[u8], field| {
            let known = Codec::ALL.into_iter().find(|codec| codec.name().as_bytes() == name);
            known.ok_or(CacheError::SnapshotHeader { field })
        };
        let (k, v) = (codec(name()?, "codec of k")?, name()?);
        let (v, kv_storage) = if v == KEY_COLUMNS.as_bytes() {
            (k, KvStorage::KeyColumns)
        } else {
            (codec(v, "codec of v")?, KvStorage::Separate)
        };
        let kept = end - first;
        let layout = CacheLayout::Contiguous { slots: 1, capacity: kept.max(1) };
        let mut desc = CacheDesc::new(layout, CacheShape { layers, kv_heads, head_dim, value_dim }, k);
        (desc.v, desc.kv_storage) = (v, kv_storage);
        desc.validate()?;

        let flags = take(&mut rest, layers).ok_or(length(HEADER.saturating_add(layers)))?;
        if flags.iter().any(|flag| *flag > HAS_MEAN | HAS_FACTORS) {
            return Err(CacheError::SnapshotHeader { field: "flag of a mean or of factors" });
        }
        let has = |bit: u8| flags.iter().any(|flag| flag & bit != 0);
        if has(HAS_MEAN) && k.dtype().is_some() {
            return Err(KeyTransformError::MeanOfElements { codec: k }.into());
        }
        if has(HAS_FACTORS) && !k.supports_key_factors() {
            return Err(KeyTransformError::FactorsOfCodec { codec: k }.into());
        }
        let lists: usize = flags.iter().map(|flag| flag.count_ones() as usize).sum();
        let list_bytes = kv_heads.saturating_mul(head_dim).saturating_mul(size_of::<f32>());
        let row_bytes = kept.saturating_mul(desc.token_bytes());
        let after = lists.saturating_mul(list_bytes).saturating_add(row_bytes);
        if rest.len() < after || !has_kept && rest.len() != after {
            return Err(length((got - rest.len()).saturating_add(after)));
        }
        let transforms = read_transforms(&desc, flags, &mut rest)?;
        let rows = take(&mut rest, row_bytes).unwrap_or_default();
        let mut bytes = Vec::new();
        reserve(&mut bytes, row_bytes)?;
        bytes.extend_from_slice(rows);
        let parts = if has_kept { read_parts(rest, got)? } else { [None, None] };
        Ok(Self { desc, kept: first..end, bytes, transforms, parts })
    }

    /// Checks that a cache with this description can hold the rows.
    pub(super) fn check(&self, desc: &CacheDesc) -> Result<(), CacheError> {
        let fields = |d: &CacheDesc| {
            [
                ("layers", d.layers),
                ("kv_heads", d.kv_heads),
                ("head_dim", d.head_dim),
                ("value_dim", d.value_dim),
            ]
        };
        for ((name, expected), (_, got)) in fields(desc).into_iter().zip(fields(&self.desc)) {
            if got != expected {
                return Err(CacheError::SnapshotDimension { name, expected, got });
            }
        }
        let codecs = |d: &CacheDesc| -> [(&'static str, Codec); 2] { [("k", d.k), ("v", d.v)] };
        for ((tensor, expected), (_, got)) in codecs(desc).into_iter().zip(codecs(&self.desc)) {
            if got != expected {
                return Err(CacheError::SnapshotCodec { tensor, expected, got });
            }
        }
        if self.desc.kv_storage != desc.kv_storage {
            return Err(CacheError::SnapshotStorage);
        }
        Ok(())
    }
}
