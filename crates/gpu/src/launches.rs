//! The launches of a problem on the kernels of the kernel language: instances, parameters, constants.

use crate::codecs::{codebooks, format_id, magnitudes, scalar_type};
use crate::kernels::attend::{ALL_KEYS, Attend, CODE_KEYS, FIRST_KEYS, LAST_KEYS, divisor};
use crate::kernels::kv::{CONTIGUOUS, PAGED, PAGED_BY_16};
use crate::kernels::merge::Merge;
use crate::kernels::prefill::block::block_align;
use crate::kernels::rows::{kv_align, product_type};
use crate::shape::{Shape, count, kept_parts};
use crate::tile::{MAX_SPLITS, Tiling};
use crate::variant::Variant;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Dims, KeyPart, KvStorage, Problem, ProblemDesc, Visibility};
use flashtile_core::scoring::log2_factors;
use flashtile_kernel::source::GenericsError;
use flashtile_kernel::{Constant, Instance, ScalarType};

/// Where tensors lie: strides in elements (q, out, masks), or in bytes (keys and values).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Strides {
    /// Strides of q over batch entry, head and row, in elements.
    pub q: [usize; 3],
    /// Strides of out over batch entry, head and row, in elements.
    pub out: [usize; 3],
    /// Strides of keys over batch entry or page, head and row, in bytes; the last is not read for codes.
    pub k: [usize; 3],
    /// Strides of values, in the units of `k`.
    pub v: [usize; 3],
    /// A power of two that the addresses of all rows of keys and values are multiples of, in bytes: at most 16.
    pub aligned: usize,
    /// True if a sequence's entries in the table are a ring, so that block numbers wrap around.
    pub ring: bool,
    /// Tokens of a page and entries of a sequence in the table; `None` where keys are contiguous or each sequence is a single page.
    pub pages: Option<[usize; 2]>,
    /// Tokens of a page, where rows of codes lie in pages that no table is needed for.
    pub rows: usize,
    /// Strides of the mask over sequence, head, query and key; 0 along an axis where the mask is broadcast.
    pub mask: [usize; 4],
    /// 0 f32, 1 f16, 2 bf16, 3 bool.
    pub mask_kind: u32,
    /// ALiBi slopes from one sequence to the next; 0 where all sequences share them.
    pub alibi: usize,
    /// Query and key.
    pub tree: [usize; 2],
    /// Factors of the rotation of equalized keys from head to head; 0 where all heads share them.
    pub k_factors: usize,
}

/// Numbers of the sequences, as [`decode()`](crate::kernels::decode::decode()) takes them. `page` is the batch entry of a
/// sequence's keys, or its only page.
pub fn sequences(problem: &Problem, page: impl Fn(usize) -> usize) -> Vec<i32> {
    let one = |(index, s): (usize, &flashtile_core::problem::Sequence)| {
        let [batch, q_start, q_len, page] = [s.batch, s.q_start, s.q_len, page(index)].map(|n| n as i32);
        let [kv_start, kv_len, first_len, last_from] =
            [s.kv_start, s.kv_len, s.first_len, s.last_from].map(|n| n as i32);
        [batch, q_start, q_len, page, kv_start, kv_len, s.q_offset as i32, first_len, last_from]
    };
    problem.sequences().iter().enumerate().flat_map(one).collect()
}

/// The launches of a problem, wherever its tensors lie.
#[derive(Debug, Clone)]
pub struct Launches {
    /// Type of q.
    q: ScalarType,
    kernels: Kernels,
    shape: Shape,
    /// Sizes and scoring; [`Placed`] has the strides.
    attend: Attend,
    rows: RowFormats,
    features: Features,
    /// Launches over tokens that are kept in 16 bits.
    kept: Vec<KeptLaunch>,
}

/// The launch over tokens that are kept in 16 bits in one storage, before the partial results are merged.
#[derive(Debug, Clone)]
pub(crate) struct KeptLaunch {
    pub(crate) part: KeyPart,
    pub(crate) kernel: Attending,
    attend: Attend,
    rows: RowFormats,
}

/// The kernels of a problem.
#[derive(Debug, Clone)]
pub(crate) struct Kernels {
    /// Computes rows, or partial results of them.
    pub(crate) attend: Attending,
    /// Merges partial results, where there are some.
    pub(crate) merge: Option<Instance>,
}

/// The first kernel.
#[derive(Debug, Clone)]
pub(crate) enum Attending {
    /// Keeps rows and streams keys.
    Prefill(Instance),
    /// Divides keys.
    Decode(Instance),
}

impl Attending {
    const fn instance(&self) -> &Instance {
        match self {
            Self::Prefill(instance) | Self::Decode(instance) => instance,
        }
    }

    const fn instance_mut(&mut self) -> &mut Instance {
        match self {
            Self::Prefill(instance) | Self::Decode(instance) => instance,
        }
    }
}

/// How rows of keys and of values are stored.
#[derive(Debug, Clone, Copy)]
struct RowFormats {
    k: u32,
    v: u32,
    head_dim: usize,
    value_dim: usize,
}

impl RowFormats {
    fn of(problem: &Problem) -> Self {
        let Dims { head_dim, value_dim, .. } = *problem.dims();
        Self { k: format_id(problem.k_codec()), v: format_id(problem.v_codec()), head_dim, value_dim }
    }
}

/// Partial results of a row that a launch stores.
#[derive(Clone, Copy)]
pub(crate) struct Partials {
    /// Index of the first.
    pub(crate) first: usize,
    /// Number of those that other launches store.
    pub(crate) others: usize,
}

/// Features of the problem that are `#[constant]` parameters of the kernels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Features {
    pub(crate) has_softcap: bool,
    pub(crate) has_alibi: bool,
    pub(crate) has_mask: bool,
    pub(crate) has_tree_mask: bool,
    pub(crate) has_sinks: bool,
}

impl Features {
    pub(crate) fn of(desc: &ProblemDesc) -> Self {
        Self {
            has_softcap: desc.softcap.is_some(),
            has_alibi: desc.alibi,
            has_mask: desc.mask.is_some(),
            has_tree_mask: desc.tree,
            has_sinks: desc.sinks,
        }
    }
}

/// Parameters and constants of launches whose tensors lie in certain places.
#[derive(Debug, Clone, Copy)]
pub struct Placed {
    pub(crate) attend: Attend,
    pub(crate) merge: Merge,
    pub(crate) paging: u32,
    pub(crate) row_align: u32,
    pub(crate) has_k_mean: bool,
}

/// Strides as kernels take them.
fn wide(strides: [usize; 3]) -> [u64; 3] {
    strides.map(|n| n as u64)
}

/// The parameters of `decode` and `prefill` that no tensor's place changes.
pub(crate) fn attend(problem: &Problem, shape: &Shape, partials: Partials) -> Result<Attend, Unsupported> {
    let (dims, desc) = (problem.dims(), problem.desc());
    let (k_codec, v_codec) = (problem.k_codec(), problem.v_codec());
    let visibility: Visibility = desc.visibility;
    let reach = |side: Option<usize>| side.map_or(i32::MAX, |n| i32::try_from(n).unwrap_or(i32::MAX));
    let factors = log2_factors(problem.scale(), desc.softcap);
    Ok(Attend {
        q_heads: shape.rows[1],
        group: count("query heads of a key/value head", dims.gqa_group())?,
        tiles: shape.tiles,
        queries: shape.rows[0],
        batches: shape.rows[2],
        left: reach(visibility.left()),
        right: reach(visibility.right()),
        part: match (problem.key_part(), &desc.kept) {
            (KeyPart::All, None) => ALL_KEYS,
            (KeyPart::All | KeyPart::Codes, _) => CODE_KEYS,
            (KeyPart::First, _) => FIRST_KEYS,
            (KeyPart::Last, _) => LAST_KEYS,
        },
        keep_last: desc.kept.as_ref().map_or(0, |kept| reach(Some(kept.last))),
        first_split: count("splits", partials.first)?,
        other_splits: count("splits", partials.others)?,
        chunk: visibility.chunk().map_or(0, |chunk| reach(Some(chunk)) as u32),
        scale: factors.scale,
        cap: factors.softcap.unwrap_or(0.0),
        codebooks: codebooks(k_codec, v_codec).1,
        k_levels: magnitudes(k_codec, dims.head_dim),
        v_levels: magnitudes(v_codec, dims.value_dim),
        ..Attend::default()
    })
}

impl Launches {
    /// The launches of a problem whose work is cut so.
    ///
    /// # Errors
    /// [`Unsupported::Tile`], [`Unsupported::Splits`], [`Unsupported::Position`], [`Unsupported::Size`], [`Unsupported::KeyColumns`] or
    /// [`Unsupported::Instance`].
    pub fn new(problem: &Problem, tiling: impl Into<Tiling>) -> Result<Self, Unsupported> {
        let Tiling { tile, splits } = tiling.into();
        if problem.kv_storage() == KvStorage::KeyColumns {
            return Err(Unsupported::KeyColumns { codec: problem.k_codec() });
        }
        tile.check(problem)?;
        if splits == 0 {
            return Err(Unsupported::Splits { got: splits, max: MAX_SPLITS });
        }
        let desc = problem.desc();
        let shape = Shape::of(problem, tile.with_splits(splits))?;
        let variant = Variant::of(problem);
        let none = |why: GenericsError| Unsupported::Instance { why: why.to_string() };
        let first = tile.instance(&variant).map_err(none)?;
        let is_prefill = tile.is_prefill();
        let attending = if is_prefill { Attending::Prefill } else { Attending::Decode };
        let stored = kept_parts(problem);
        let all = splits + stored.len();
        let has_partials = !is_prefill || all > 1;
        let kernels = Kernels {
            attend: attending(first),
            merge: has_partials.then(|| variant.merge().map_err(none)).transpose()?,
        };
        let kept = stored.into_iter().enumerate().map(|(index, part)| {
            let problem = problem.part(part);
            tile.check(&problem)?;
            let kernel = attending(tile.instance(&Variant::of(&problem)).map_err(none)?);
            let others = Partials { first: splits + index, others: all - 1 };
            Ok(KeptLaunch {
                part,
                kernel,
                attend: attend(&problem, &shape, others)?,
                rows: RowFormats::of(&problem),
            })
        });
        Ok(Self {
            q: scalar_type(problem.dtype()),
            kernels,
            attend: attend(problem, &shape, Partials { first: 0, others: all - splits })?,
            kept: kept.collect::<Result<_, Unsupported>>()?,
            shape,
            rows: RowFormats::of(problem),
            features: Features::of(desc),
        })
    }

    /// Completes the parameters for tensors that lie so; `centered` where keys have means.
    ///
    /// # Errors
    /// [`Unsupported::Size`].
    pub fn place(&self, strides: &Strides, centered: bool) -> Result<Placed, Unsupported> {
        self.place_part((&self.kernels.attend, &self.attend, &self.rows), strides, centered)
    }

    /// [`Launches::place`] of a launch over kept tokens, which lie so.
    pub(crate) fn place_kept(
        &self,
        index: usize,
        strides: &Strides,
        centered: bool,
    ) -> Result<Placed, Unsupported> {
        let KeptLaunch { kernel, attend, rows, .. } = &self.kept[index];
        self.place_part((kernel, attend, rows), strides, centered)
    }

    fn place_part(
        &self,
        (kernel, attend, rows): (&Attending, &Attend, &RowFormats),
        strides: &Strides,
        centered: bool,
    ) -> Result<Placed, Unsupported> {
        let [page, width] = strides.pages.unwrap_or([strides.rows.max(1), 1]);
        let attend = Attend {
            q: wide(strides.q),
            k: wide(strides.k),
            v: wide(strides.v),
            mask: [strides.mask[0], strides.mask[1], strides.mask[2]].map(|n| n as u64),
            tree: strides.tree[0] as u64,
            mask_step: count("a mask's stride", strides.mask[3])?,
            tree_step: count("a tree's stride", strides.tree[1])?,
            mask_kind: strides.mask_kind,
            alibi_stride: count("query heads", strides.alibi)?,
            page: count("tokens of a page", page)?,
            page_divisor: divisor(page),
            ring_divisor: if strides.ring { divisor(width) } else { [0; 2] },
            width: count("pages of a sequence", width)?,
            k_factor_stride: strides.k_factors as u64,
            ..*attend
        };
        let merge = Merge {
            out: wide(strides.out),
            q_heads: attend.q_heads,
            queries: attend.queries,
            splits: self.shape.groups[1] + self.kept.len() as u32,
            simds: self.shape.simds,
        };
        let RowFormats { k, v, head_dim, value_dim } = *rows;
        let row_align = match kernel {
            Attending::Decode(_) => kv_align(k, head_dim, v, value_dim, strides.aligned),
            Attending::Prefill(_) => {
                let align =
                    |format, dim| block_align(product_type(self.q, format), format, dim, strides.aligned);
                align(k, head_dim).max(align(v, value_dim))
            }
        };
        let paging = match strides.pages {
            None => CONTIGUOUS,
            Some([page, _]) if page.is_multiple_of(16) => PAGED_BY_16,
            Some(_) => PAGED,
        };
        Ok(Placed { attend, merge, paging, row_align, has_k_mean: centered })
    }

    /// Launches over tokens that are kept in 16 bits, after the first.
    pub(crate) fn kept(&self) -> &[KeptLaunch] {
        &self.kept
    }

    pub(crate) const fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(crate) const fn features(&self) -> Features {
        self.features
    }

    /// f32 that `partial_out` and `partial_max_sum` hold.
    pub const fn scratch(&self) -> [usize; 2] {
        self.shape.scratch
    }

    pub(crate) const fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The kernels, in the order of their launches.
    pub fn instances(&self) -> Vec<&Instance> {
        let kept = self.kept.iter().map(|launch| launch.kernel.instance());
        std::iter::once(self.kernels.attend.instance()).chain(kept).chain(&self.kernels.merge).collect()
    }

    /// The first kernel.
    pub const fn first(&self) -> &Instance {
        self.kernels.attend.instance()
    }

    /// The name of the first kernel's instance.
    pub fn entry(&self) -> String {
        self.first().entry()
    }

    /// The kernels, each with the values of its `#[constant]` parameters in launches, in order.
    /// `kept` are the parameters of the launches over kept tokens.
    pub fn constants(
        &self,
        placed: &Placed,
        kept: &[Placed],
        with_lse: bool,
    ) -> Vec<(&Instance, Vec<Constant>)> {
        let has = self.features;
        let of = |placed: &Placed| {
            let mut constants = vec![Constant::of(placed.paging), Constant::of(placed.row_align)];
            constants
                .extend([has.has_softcap, has.has_alibi, has.has_mask, has.has_tree_mask].map(Constant::of));
            constants.push(Constant::of(placed.has_k_mean));
            if let Attending::Prefill(_) = self.kernels.attend {
                let (ends, is_split) = (self.kernels.merge.is_none(), self.kernels.merge.is_some());
                constants.extend([ends && has.has_sinks, ends && with_lse, is_split].map(Constant::of));
            }
            constants
        };
        let kept = self.kept.iter().zip(kept).map(|(launch, placed)| (launch.kernel.instance(), of(placed)));
        let mut all: Vec<_> = kept.collect();
        all.insert(0, (self.kernels.attend.instance(), of(placed)));
        if let Some(merge) = &self.kernels.merge {
            all.push((merge, [has.has_sinks, with_lse, has.has_alibi].map(Constant::of).to_vec()));
        }
        all
    }

    /// Replaces the instances by native code. Returns `None` if `find` has none for one of them.
    pub fn with_native(mut self, find: impl Fn(&Instance) -> Option<Instance>) -> Option<Self> {
        let attend = self.kernels.attend.instance_mut();
        *attend = find(attend)?;
        for launch in &mut self.kept {
            let attend = launch.kernel.instance_mut();
            *attend = find(attend)?;
        }
        if let Some(merge) = &mut self.kernels.merge {
            *merge = find(merge)?;
        }
        Some(self)
    }
}
