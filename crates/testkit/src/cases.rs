//! Cases: problems and the recipes of their data.

use super::poison::{Guarded, GuardedList, GuardedMask, Layout, Placement};
use super::rng::Rng;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::block_tables::NO_PAGE;
use flashtile_core::codec::{CodePages, Codec, KeyTransform, KvView, Side};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::inputs::{Inputs, KeptInputs, KeptPages};
use flashtile_core::problem::{Dims, Problem, ProblemDesc, ProblemError, QOffset, Sequences, Visibility};
use flashtile_core::problem::{KeptTokens, KeyPart, SeqLens, Sequence, SharedPrefix};
use std::ops::Range;
use std::sync::Arc;

/// Elements of a materialised mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskFill {
    /// One key in four is hidden; the bias of the others is normal.
    Random,
    /// Every third query row sees no key; otherwise like [`MaskFill::Random`].
    HiddenRows,
    /// Nothing hidden, no bias.
    Open,
    /// Everything hidden.
    Closed,
    /// Rectangles of 40 queries and 300 keys that are open, hidden or random: every kind of mask tile, unaligned to
    /// tiles.
    Blocks,
    /// The first 1024 keys are hidden, the others open: whole splits of which a row sees nothing.
    Late,
    /// Finite biases as large as f16 allows: most keys at -60000, some at 0, and in every fifth row one at +60000.
    Extreme,
}

/// Recipe of a materialised mask, whose kind is the problem's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct Mask {
    /// Which of the axes `[batch, heads, queries, keys]` are 1.
    pub broadcast: [bool; 4],
    /// Its elements.
    pub fill: MaskFill,
}

/// Which tokens of a cached sequence are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// All of them.
    All,
    /// The tokens from the first visible one on.
    Seen,
    /// Like [`Keep::Seen`], with tables only as wide as the kept tokens, so that blocks wrap around as in a ring.
    Wrapped,
}

/// How cached tokens are paged. Pages are in random order, a few pages of the pool are unused, and every row without
/// a kept token is poison. A page as long as the longest sequence makes a contiguous cache, or a ring with
/// [`Keep::Wrapped`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct Paging {
    /// Tokens per page.
    pub page: usize,
    /// Which tokens are kept.
    pub keep: Keep,
}

/// Which keys a tree mask shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tree {
    /// For each token of the step, itself and those before it.
    Causal,
    /// For each token, itself and its ancestors in a random tree.
    Branches,
    /// Each with a probability of two thirds.
    Random,
}

/// A named problem with the recipe of its data.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Case {
    /// Name, unique in the catalogue.
    pub name: String,
    /// The problem.
    pub desc: ProblemDesc,
    /// Layout of q, k, v and out in memory.
    pub layout: Layout,
    /// Where every tensor lies in its allocation.
    pub placement: Placement,
    /// Scale of q: the standard deviation of the logits at the default scale.
    pub gain: f32,
    /// Recipe of the mask, if the problem has one.
    pub mask: Option<Mask>,
    /// How tokens are paged, if sequences are cached.
    pub paging: Paging,
    /// Recipe of the tree mask, if the problem has one.
    pub tree: Tree,
    /// True if each sequence has ALiBi slopes of its own.
    pub alibi_per_sequence: bool,
    /// True if keys have a constant component, a few times as large as the rest, that is subtracted before
    /// they are quantized.
    pub centered: bool,
    /// First tokens of each sequence that are kept in 16 bits, if some are.
    pub keep_first: usize,
    /// True if the channels of keys have unequal magnitudes, by factors that keys are divided by before they are quantized.
    pub equalized: bool,
}

impl Case {
    /// A case with every option at its default. Dimensions are in the order of [`Dims`]: batch, query heads,
    /// key/value heads, query rows, key rows, head dimension, value dimension.
    #[must_use]
    pub fn new(name: impl Into<String>, dims: [usize; 7], dtype: Dtype) -> Self {
        let [batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim] = dims;
        let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        let desc = ProblemDesc::new(dims, dtype);
        Self {
            name: name.into(),
            desc,
            layout: Layout::Bhsd,
            placement: Placement::Guarded,
            gain: 1.0,
            mask: None,
            paging: Paging { page: 16, keep: Keep::All },
            tree: Tree::Causal,
            alibi_per_sequence: false,
            centered: false,
            keep_first: 0,
            equalized: false,
        }
    }

    /// With the first and the last tokens of each sequence in 16 bits beside their codes. Every third sequence lacks some of the last
    /// ones, and every fourth has no first ones. Sequences must be cached.
    #[must_use]
    pub fn kept(mut self, first: usize, last: usize) -> Self {
        let Sequences::Cached { cu_seqlens_q, kv_lens } = &self.desc.sequences else { return self };
        let q_lens = cu_seqlens_q.windows(2).map(|w| w[1] - w[0]);
        let from = |(index, (q_len, &kv_len)): (usize, (usize, &usize))| match index % 3 {
            _ if last == 0 => kv_len,
            2 => kv_len - q_len.min(kv_len) / 2,
            _ => kv_len.saturating_sub(q_len + last),
        };
        let last_from = q_lens.zip(kv_lens).enumerate().map(from).collect();
        let first_len =
            |(index, &kv_len): (usize, &usize)| if index % 4 == 3 { 0 } else { first.min(kv_len) };
        let first_lens = kv_lens.iter().enumerate().map(first_len).collect();
        self.desc.kept = Some(KeptTokens { last, first_lens, last_from });
        self.keep_first = first;
        self
    }

    /// With these codecs of keys and values.
    #[must_use]
    pub fn stored(mut self, k: Codec, v: Codec) -> Self {
        (self.desc.k_codec, self.desc.v_codec) = (Some(k), Some(v));
        self
    }

    /// With a constant component of the keys.
    #[must_use]
    pub fn centered(mut self) -> Self {
        self.centered = true;
        self
    }

    /// With channels of keys of unequal magnitudes.
    #[must_use]
    pub fn equalized(mut self) -> Self {
        self.equalized = true;
        self
    }

    /// In this memory layout.
    #[must_use]
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// With tensors at the end of their allocations, for memory checkers. The data is the same.
    #[must_use]
    pub fn exact(mut self) -> Self {
        self.placement = Placement::exact(&self.name);
        self
    }

    /// With logits of this standard deviation at the default scale.
    #[must_use]
    pub fn gain(mut self, gain: f32) -> Self {
        self.gain = gain;
        self
    }

    /// With query row 0 at this key position.
    #[must_use]
    pub fn at(mut self, offset: QOffset) -> Self {
        self.desc.q_offset = Some(offset);
        self
    }

    /// With only the keys visible that this band shows too.
    #[must_use]
    pub fn seeing(mut self, visibility: Visibility) -> Self {
        self.desc.visibility = self.desc.visibility.and(visibility);
        self
    }

    /// Causal, with query row 0 at this key position.
    #[must_use]
    pub fn causal(self, offset: QOffset) -> Self {
        self.seeing(Visibility::causal()).at(offset)
    }

    /// With a softcap.
    #[must_use]
    pub fn softcap(mut self, softcap: f32) -> Self {
        self.desc.softcap = Some(softcap);
        self
    }

    /// With a scale.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.desc.scale = Some(scale);
        self
    }

    /// With ALiBi slopes.
    #[must_use]
    pub fn alibi(mut self) -> Self {
        self.desc.alibi = true;
        self
    }

    /// With ALiBi slopes for each sequence.
    #[must_use]
    pub fn alibi_per_sequence(mut self) -> Self {
        self.alibi_per_sequence = true;
        self.alibi()
    }

    /// With sinks.
    #[must_use]
    pub fn sinks(mut self) -> Self {
        self.desc.sinks = true;
        self
    }

    /// With a mask; an axis named in `broadcast` (of `"bhqk"`) is 1.
    #[must_use]
    pub fn mask(mut self, kind: MaskKind, broadcast: &str, fill: MaskFill) -> Self {
        self.desc.mask = Some(kind);
        let axes = ['b', 'h', 'q', 'k'];
        self.mask = Some(Mask { broadcast: axes.map(|axis| broadcast.contains(axis)), fill });
        self
    }

    /// With these numbers of keys per batch entry.
    #[must_use]
    pub fn kv_lens(mut self, kv_lens: &[usize]) -> Self {
        self.desc.sequences = Sequences::Padded { kv_lens: kv_lens.to_vec() };
        self
    }

    /// With sequences of these (query, key) lengths packed one after another; sets `q_len` and `kv_len`.
    #[must_use]
    pub fn packed(mut self, lengths: &[(usize, usize)]) -> Self {
        let (mut cu_seqlens_q, mut cu_seqlens_k) = (vec![0], vec![0]);
        let (mut q_len, mut kv_len) = (0, 0);
        for (q, k) in lengths {
            q_len += q;
            kv_len += k;
            cu_seqlens_q.push(q_len);
            cu_seqlens_k.push(kv_len);
        }
        self.desc.dims.q_len = q_len;
        self.desc.dims.kv_len = kv_len;
        self.desc.sequences = Sequences::Packed { cu_seqlens_q, cu_seqlens_k };
        if self.layout == Layout::Bhsd {
            self.layout = Layout::Bshd;
        }
        self
    }

    /// With cached sequences of these (query, key) lengths; sets `q_len` and `kv_len`.
    #[must_use]
    pub fn cached(mut self, lengths: &[(usize, usize)], page: usize, keep: Keep) -> Self {
        self.desc.dims.q_len = lengths.iter().map(|&(q, _)| q).sum();
        self.desc.dims.kv_len = lengths.iter().map(|&(_, kv)| kv).max().unwrap_or(0);
        let lens: Vec<SeqLens> = lengths.iter().map(|&(q_len, kv_len)| SeqLens { q_len, kv_len }).collect();
        self.desc.sequences = Sequences::cached(&lens);
        self.paging = Paging { page, keep };
        if self.layout == Layout::Bhsd {
            self.layout = Layout::Bshd;
        }
        self
    }

    /// With shared prefixes, as sequences and tokens, outer ones first. The sequences must be cached with all tokens
    /// kept.
    #[must_use]
    pub fn shared(mut self, prefixes: &[(Range<usize>, usize)]) -> Self {
        let prefix = |(sequences, len): &(Range<usize>, usize)| SharedPrefix {
            sequences: sequences.clone(),
            len: *len,
        };
        self.desc.prefixes = prefixes.iter().map(prefix).collect();
        self
    }

    /// With a tree mask.
    #[must_use]
    pub fn tree(mut self, tree: Tree) -> Self {
        self.desc.tree = true;
        self.tree = tree;
        self
    }

    /// Makes the tensors. Their data depends only on the case's name.
    ///
    /// # Errors
    /// [`ProblemError`] if the description is not a valid problem.
    pub fn build(&self) -> Result<CaseData, ProblemError> {
        let problem = self.desc.clone().validate()?;
        let dims = *problem.dims();
        let is_cached = matches!(self.desc.sequences, Sequences::Cached { .. });
        // A spare page at the end of an exactly placed pool would hide a read past the last page in use.
        let spare = if self.placement == Placement::Guarded { 3 } else { 0 };
        let pool = is_cached.then(|| Pool::new(&problem, self.paging, spare));
        let mut data =
            Generator { case: self, problem: &problem, pool: pool.as_ref(), rng: Rng::named(&self.name) };
        let q = data.queries();
        let (k, k_codes) = data.stored(Side::Keys);
        let (v, v_codes) = data.stored(Side::Values);
        let mut rng = data.rng;
        let memory = (self.layout, self.placement);
        let mask = problem.desc().mask.zip(self.mask);
        let mask = mask.map(|(kind, recipe)| build_mask(&problem, kind, recipe, memory, &mut rng));
        // Slopes of both signs: nothing restricts them to the usual powers of two.
        let slope = |h: usize| if h % 3 == 2 { -0.01 } else { 0.9 / (1u32 << (h % 8 + 1)) as f32 };
        let of_sequences = if self.alibi_per_sequence { problem.sequences().len() } else { 1 };
        let slopes: Vec<f32> =
            (0..of_sequences).flat_map(|n| (0..dims.q_heads).map(move |h| slope(h + n))).collect();
        let sinks: Vec<f32> = (0..dims.q_heads).map(|_| 2.0 * rng.normal()).collect();
        let tree = self.desc.tree.then(|| build_tree(&problem, self.tree, memory, &mut rng));
        Ok(CaseData {
            layout: self.layout,
            placement: self.placement,
            q,
            k,
            v,
            k_codes: k_codes.map(Arc::new),
            v_codes: v_codes.map(Arc::new),
            tables: pool.map(|pool| pool.tables),
            kept: self.build_kept(&problem),
            tree,
            mask,
            alibi_slopes: self.desc.alibi.then(|| self.guarded(&slopes)),
            sinks: self.desc.sinks.then(|| self.guarded(&sinks)),
            problem,
        })
    }

    /// Pages of the kept tokens: slots in reverse order, behind an unused one. Their elements differ from the elements of the codes, so that a row
    /// read from the wrong storage shows.
    fn build_kept(&self, problem: &Problem) -> [Option<Arc<KeptData>>; 2] {
        let Some(kept) = &problem.desc().kept else { return [None, None] };
        let first = (self.keep_first > 0).then_some((KeyPart::First, self.keep_first));
        let longest = |s: &Sequence| s.kv_len - s.last_from;
        let ring = problem.sequences().iter().map(longest).max().unwrap_or(0).max(1).next_multiple_of(16);
        let last = (kept.last > 0).then_some((KeyPart::Last, ring));
        [first, last].map(|of| {
            let (part, capacity) = of?;
            let problem = problem.part(part);
            let pool = Pool::of_slots(&problem, capacity);
            let case = Self { paging: Paging { page: capacity, keep: Keep::All }, ..self.clone() };
            let rng = Rng::named(&format!("{} {part:?}", self.name));
            let mut data = Generator { case: &case, problem: &problem, pool: Some(&pool), rng };
            let (k, k_codes) = data.stored(Side::Keys);
            let (v, v_codes) = data.stored(Side::Values);
            Some(Arc::new(KeptData { k, v, k_codes, v_codes, tables: pool.tables }))
        })
    }

    fn guarded(&self, values: &[f32]) -> GuardedList {
        let mut list = GuardedList::placed(values.len(), self.placement);
        list.slice_mut().copy_from_slice(values);
        list
    }
}

/// Fills q, k and v of a case from one generator of random numbers.
struct Generator<'a> {
    case: &'a Case,
    problem: &'a Problem,
    pool: Option<&'a Pool>,
    rng: Rng,
}

/// The distribution of a tensor's elements: normal, with this deviation, times a factor and around a mean for each head and dimension,
/// where there are some.
struct Distribution<'a> {
    std_dev: f32,
    mean: &'a [f32],
    factors: &'a [f32],
}

/// A row of a tensor: the batch entry or the page, and the row in it.
type Row = (usize, usize);

impl Generator<'_> {
    fn queries(&mut self) -> Guarded {
        let (shape, dtype) = (self.problem.dims().q_shape(), self.problem.dtype());
        let distribution = Distribution { std_dev: self.case.gain, mean: &[], factors: &[] };
        let rows: Vec<Vec<Row>> =
            self.problem.sequences().iter().map(|s| span(s.batch, s.q_start, s.q_len)).collect();
        self.tensor(dtype, shape, &distribution, &rows)
    }

    /// Keys or values, and the pages of their codec if that is quantizing.
    fn stored(&mut self, side: Side) -> (Guarded, Option<CodePages>) {
        let dims = *self.problem.dims();
        let (codec, dense_shape, dim) = match side {
            Side::Keys => (self.problem.k_codec(), dims.k_shape(), dims.head_dim),
            Side::Values => (self.problem.v_codec(), dims.v_shape(), dims.value_dim),
        };
        let shape = match self.pool {
            None => dense_shape,
            Some(pool) => [pool.pages, dims.kv_heads, self.case.paging.page, dim],
        };
        let is_centered = self.case.centered && side == Side::Keys;
        let mean = is_centered.then(|| {
            let mut rng = Rng::new(99);
            (0..dims.kv_heads * dim).map(|_| 4.0 * rng.normal()).collect::<Vec<f32>>()
        });
        let is_equalized = self.case.equalized && side == Side::Keys;
        let factors = is_equalized.then(|| {
            let mut rng = Rng::new(98);
            let factor = |_| if rng.below(2) == 0 { 1.0 } else { -1.0 } * rng.normal().exp();
            (0..dims.kv_heads * dim).map(factor).collect::<Vec<f32>>()
        });
        let rows: Vec<Vec<Row>> =
            self.problem.sequences().iter().enumerate().map(|(index, s)| self.kv_rows(index, s)).collect();
        let [mean_of, factors_of] = [&mean, &factors].map(|list| list.as_deref().unwrap_or_default());
        let distribution = Distribution { std_dev: 1.0, mean: mean_of, factors: factors_of };
        let dtype = codec.dtype().unwrap_or(self.problem.dtype());
        let tensor = self.tensor(dtype, shape, &distribution, &rows);
        let pages = CodePages::new(codec, side, shape).ok().map(|mut pages| {
            pages.set_key_transform(KeyTransform::new(mean, factors));
            store(&mut pages, &tensor, &rows.concat());
            pages
        });
        (tensor, pages)
    }

    /// The rows of keys and values that hold tokens of a sequence.
    fn kv_rows(&self, index: usize, sequence: &Sequence) -> Vec<Row> {
        match self.pool {
            None => span(sequence.batch, sequence.kv_start, sequence.kv_len),
            Some(pool) => {
                let stored = self.problem.stored(sequence);
                stored.filter_map(|j| pool.tables.locate(index, j)).collect()
            }
        }
    }

    /// A tensor with random elements in these rows of each sequence, and NaN elsewhere.
    fn tensor(
        &mut self,
        dtype: Dtype,
        shape: [usize; 4],
        distribution: &Distribution<'_>,
        rows: &[Vec<Row>],
    ) -> Guarded {
        let mut tensor = Guarded::placed(dtype, shape, self.case.layout, self.case.placement);
        let [_, heads, _, dim] = shape;
        for rows in rows {
            for h in 0..heads {
                for &(entry, row) in rows {
                    for d in 0..dim {
                        let mean = distribution.mean.get(h * dim + d).copied().unwrap_or(0.0);
                        let factor = distribution.factors.get(h * dim + d).copied().unwrap_or(1.0);
                        let std_dev = distribution.std_dev * factor;
                        tensor.set([entry, h, row, d], std_dev * self.rng.normal() + mean);
                    }
                }
            }
        }
        tensor
    }
}

fn span(entry: usize, start: usize, len: usize) -> Vec<Row> {
    (start..start + len).map(|row| (entry, row)).collect()
}

/// Stores rows of a tensor in the pages of a codec; the other rows of the pages become NaN.
fn store(pages: &mut CodePages, tensor: &Guarded, rows: &[Row]) {
    let [count, heads, page_rows, dim] = tensor.view().shape();
    for (page, row) in (0..count).flat_map(|page| (0..page_rows).map(move |row| (page, row))) {
        pages.poison(page, row);
    }
    for &(page, row) in rows {
        for head in 0..heads {
            let x: Vec<f32> = (0..dim).map(|d| tensor.get([page, head, row, d])).collect();
            let stored = pages.store([page, head, row], &x);
            debug_assert!(stored.is_ok(), "rows of cases are finite and of ordinary size");
        }
    }
}

/// Where cached tokens lie.
struct Pool {
    tables: BlockTables,
    /// Pages of the pool, spare ones included.
    pages: usize,
}

impl Pool {
    /// Tables of a problem's sequences over pages in random order, of which `spare` are not used.
    fn new(problem: &Problem, Paging { page, keep }: Paging, spare: usize) -> Self {
        let sequences = problem.sequences();
        let first = |s: &Sequence| match keep {
            Keep::All => 0,
            Keep::Seen | Keep::Wrapped => problem.first_visible(s).map_or(s.kv_len, |(_, key)| key),
        };
        let wraps = keep == Keep::Wrapped;
        let reach = |s: &Sequence| s.kv_len - if wraps { first(s) } else { 0 };
        let width = sequences.iter().map(|s| reach(s).div_ceil(page)).max().unwrap_or(0);
        let mut tables = BlockTables {
            table: vec![NO_PAGE; sequences.len() * width],
            width,
            page_size: page,
            wraps,
            lens: sequences.iter().map(|s| s.kv_len).collect(),
            first: sequences.iter().map(first).collect(),
        };
        let entries = block_entries(problem, &tables);
        let mut used: Vec<usize> = entries.iter().map(|entry| entry.owner).collect();
        used.sort_unstable();
        used.dedup();
        // The order of pages has a generator of its own, so that the data does not depend on paging.
        let pages = used.len() + spare;
        let mut order: Vec<u32> = (0..pages as u32).collect();
        Rng::new(page as u64).shuffle(&mut order);
        for (owner, page) in used.into_iter().zip(order) {
            tables.table[owner] = page;
        }
        for BlockEntry { entry, owner } in entries {
            tables.table[entry] = tables.table[owner];
        }
        Self { tables, pages }
    }
}

impl Pool {
    /// Slots of a part of a problem's keys, one for each sequence.
    fn of_slots(problem: &Problem, capacity: usize) -> Self {
        let sequences = problem.sequences();
        let count = sequences.len();
        let lens: Vec<usize> = match problem.key_part() {
            KeyPart::First => sequences.iter().map(|s| s.first_len).collect(),
            KeyPart::All | KeyPart::Codes | KeyPart::Last => sequences.iter().map(|s| s.kv_len).collect(),
        };
        let first: Vec<usize> = sequences.iter().map(|s| problem.stored(s).start).collect();
        let wraps = lens.iter().zip(&first).any(|(&len, &first)| first < len && len > capacity);
        let table = (1..=count as u32).rev().collect();
        let tables = BlockTables { table, width: 1, page_size: capacity, wraps, lens, first };
        Self { tables, pages: count + 1 }
    }
}

/// A table entry of a kept block, and the entry that has the block's page: another one where a prefix is shared.
struct BlockEntry {
    entry: usize,
    owner: usize,
}

fn block_entries(problem: &Problem, tables: &BlockTables) -> Vec<BlockEntry> {
    let &BlockTables { page_size: page, width, .. } = tables;
    let prefixes = &problem.desc().prefixes;
    // The first of the sequences that share a block.
    let owner = |index: usize, block: usize| {
        let covers = |p: &&SharedPrefix| p.sequences.contains(&index) && block * page < p.len;
        prefixes.iter().find(covers).map_or(index, |p| p.sequences.start)
    };
    let mut entries = Vec::new();
    for (index, s) in problem.sequences().iter().enumerate() {
        let kept = tables.first[index]..s.kv_len;
        let blocks = if kept.is_empty() { 0..0 } else { kept.start / page..kept.end.div_ceil(page) };
        for block in blocks {
            let entry = |sequence: usize| sequence * width + block % width;
            entries.push(BlockEntry { entry: entry(index), owner: entry(owner(index, block)) });
        }
    }
    entries
}

fn build_tree(problem: &Problem, tree: Tree, memory: (Layout, Placement), rng: &mut Rng) -> GuardedMask {
    let [_, _, rows, columns] = problem.tree_shape();
    let mut shows = vec![true; rows * columns];
    for s in problem.sequences() {
        for i in 0..s.q_len {
            let row = (s.q_start + i) * columns;
            let parent = rng.below(i.max(1));
            for c in 0..s.q_len {
                shows[row + c] = match tree {
                    Tree::Causal => c <= i,
                    Tree::Branches if c >= i => c == i,
                    Tree::Branches => c == parent || shows[(s.q_start + parent) * columns + c],
                    Tree::Random => rng.below(3) > 0,
                };
            }
        }
    }
    GuardedMask::placed(MaskKind::Bool, problem.tree_shape(), memory, |[_, _, row, c]| {
        if shows[row * columns + c] { 0.0 } else { f32::NEG_INFINITY }
    })
}

fn build_mask(
    problem: &Problem,
    kind: MaskKind,
    recipe: Mask,
    memory: (Layout, Placement),
    rng: &mut Rng,
) -> GuardedMask {
    let mut shape = problem.mask_shape();
    for (n, broadcast) in shape.iter_mut().zip(recipe.broadcast) {
        if broadcast {
            *n = 1;
        }
    }
    let sequences = problem.sequences();
    // Elements that belong to no (query, key) pair of any sequence stay poison.
    let used = |[n, _, i, j]: [usize; 4]| {
        let inside =
            |s: &Sequence| (recipe.broadcast[2] || i < s.q_len) && (recipe.broadcast[3] || j < s.kv_len);
        if recipe.broadcast[0] { sequences.iter().any(inside) } else { inside(&sequences[n]) }
    };
    GuardedMask::placed(kind, shape, memory, |index| {
        if used(index) { bias(recipe.fill, index, rng) } else { f32::NAN }
    })
}

fn bias(fill: MaskFill, [_, h, i, j]: [usize; 4], rng: &mut Rng) -> f32 {
    let (draw, normal) = (rng.below(4), rng.normal());
    let random = if draw == 0 { f32::NEG_INFINITY } else { normal };
    match fill {
        MaskFill::Random => random,
        MaskFill::HiddenRows if i % 3 == 1 => f32::NEG_INFINITY,
        MaskFill::HiddenRows => random,
        MaskFill::Open => 0.0,
        MaskFill::Closed => f32::NEG_INFINITY,
        MaskFill::Blocks => match (i / 40 + j / 300 + h) % 3 {
            0 => 0.0,
            1 => f32::NEG_INFINITY,
            _ => random,
        },
        MaskFill::Late if j < 1024 => f32::NEG_INFINITY,
        MaskFill::Late => 0.0,
        MaskFill::Extreme if i % 5 == 4 && j == i % 7 => 60000.0,
        MaskFill::Extreme if (j + i) % 4 == 0 => 0.0,
        MaskFill::Extreme => -60000.0,
    }
}

/// Pages of the tokens of a case that are kept in 16 bits.
#[derive(Debug)]
#[non_exhaustive]
pub struct KeptData {
    /// `[pages, kv_heads, page_size, head_dim]`.
    pub k: Guarded,
    /// `[pages, kv_heads, page_size, value_dim]`.
    pub v: Guarded,
    /// The keys as stored, if their codec has no elements.
    pub k_codes: Option<CodePages>,
    /// The values as stored, if their codec has no elements.
    pub v_codes: Option<CodePages>,
    /// Which page holds which token.
    pub tables: BlockTables,
}

impl KeptData {
    fn pages(&self) -> KeptPages<'_> {
        KeptPages {
            k: stored_view(&self.k, self.k_codes.as_ref()),
            v: stored_view(&self.v, self.v_codes.as_ref()),
            tables: &self.tables,
        }
    }
}

/// Rows as a run reads them: codes, or elements.
fn stored_view<'a>(tensor: &'a Guarded, codes: Option<&'a CodePages>) -> KvView<'a> {
    codes.map_or_else(|| KvView::Elements(tensor.view()), |codes| KvView::Codes(codes.view()))
}

/// The tensors of a case in guarded memory: padding, and everything outside the views, is NaN.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CaseData {
    /// The problem.
    pub problem: Problem,
    /// Layout of q, k, v and out.
    pub layout: Layout,
    /// Where every tensor lies in its allocation.
    pub placement: Placement,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: Guarded,
    /// `[batch, kv_heads, kv_len, head_dim]`, or pages `[pages, kv_heads, page_size, head_dim]`.
    pub k: Guarded,
    /// `[batch, kv_heads, kv_len, value_dim]`, or pages `[pages, kv_heads, page_size, value_dim]`.
    pub v: Guarded,
    /// The keys as stored, if their codec quantizes; `k` holds the originals.
    pub k_codes: Option<Arc<CodePages>>,
    /// The values as stored, if their codec quantizes.
    pub v_codes: Option<Arc<CodePages>>,
    /// Which page holds which token, if sequences are cached.
    pub tables: Option<BlockTables>,
    /// The first and the last tokens that are kept in 16 bits.
    pub kept: [Option<Arc<KeptData>>; 2],
    /// The tree mask, if the problem has one.
    pub tree: Option<GuardedMask>,
    /// The mask, if the problem has one.
    pub mask: Option<GuardedMask>,
    /// ALiBi slopes, if the problem has them.
    pub alibi_slopes: Option<GuardedList>,
    /// Sinks, if the problem has them.
    pub sinks: Option<GuardedList>,
}

impl CaseData {
    /// The tensors as inputs of a run.
    #[must_use]
    pub fn inputs(&self) -> Inputs<'_> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        inputs.k = stored_view(&self.k, self.k_codes.as_deref());
        inputs.v = stored_view(&self.v, self.v_codes.as_deref());
        inputs.tables = self.tables.as_ref();
        if self.problem.desc().kept.is_some() {
            let [first, last] = self.kept.each_ref().map(|kept| kept.as_ref().map(|kept| kept.pages()));
            inputs.kept = Some(KeptInputs { first, last });
        }
        inputs.tree = self.tree.as_ref().map(GuardedMask::view);
        inputs.mask = self.mask.as_ref().map(GuardedMask::view);
        inputs.alibi_slopes = self.alibi_slopes.as_ref().map(GuardedList::slice);
        inputs.sinks = self.sinks.as_ref().map(GuardedList::slice);
        inputs
    }
}
