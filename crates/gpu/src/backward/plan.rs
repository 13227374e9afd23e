//! Plans of the backward pass.

use super::tile::{BackwardTile, BackwardVariant};
use crate::facts::GpuFacts;
use crate::kernels::attend::{Attend, SEQUENCE_WORDS};
use crate::kernels::backward::row_terms::TERM_ROWS;
use crate::kernels::backward::sum_rows::sum_rows;
use crate::launches::{Features, Partials, attend};
use crate::shape::{Shape, count};
use crate::tile::PortableTile;
use flashtile_core::dtype::MaskKind;
use flashtile_core::plan::{KernelChoice, PlanOptions, Unsupported};
use flashtile_core::problem::{Problem, Sequence, Sequences};
use flashtile_kernel::Instance;
use flashtile_kernel::source::GenericsError;

/// The launches of the backward pass of a problem.
#[derive(Debug, Clone)]
pub struct PortableBackwardPlan {
    problem: Problem,
    tile: BackwardTile,
    /// Sizes and scoring, without strides. Each launch has its own number of tiles.
    pub(crate) attend: Attend,
    pub(crate) has: Features,
    /// Rows of `d_k` and `d_v` of a batch entry; 0 where sequences are packed.
    pub(crate) kv_rows: u32,
    pub(crate) terms: Step,
    pub(crate) q: Step,
    pub(crate) kv: Step,
    /// Where the problem has an additive mask. Its shape, on which groups depend, is that of a run.
    pub(crate) bias: Option<Instance>,
    pub(crate) sums: Instance,
}

/// A kernel over tiles of every key/value head.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) instance: Instance,
    /// Tiles of a head.
    pub(crate) tiles: u32,
    /// Threadgroups.
    pub(crate) groups: [u32; 3],
}

impl PortableBackwardPlan {
    /// Plans the backward pass of a problem for a device. Splits of the options are the forward pass's alone.
    ///
    /// # Errors
    /// [`Unsupported`].
    pub fn new(problem: &Problem, facts: &GpuFacts, options: PlanOptions) -> Result<Self, Unsupported> {
        if let Some(why) = problem.no_gradients() {
            return Err(Unsupported::Backward { why });
        }
        if options.kernels == KernelChoice::Native {
            return Err(Unsupported::Backward {
                why: "native kernels of it were asked for, there are portable ones",
            });
        }
        if !options.skip_tiles {
            return Err(Unsupported::SkipTiles);
        }
        let tile = BackwardTile::of(&BackwardVariant::of(problem), has_bias(problem), facts)?;
        let plan = Self::with_tile(problem, tile)?;
        let max = facts.max_groups;
        let others = [&plan.terms, &plan.q, &plan.kv].map(|step| step.groups[2] as usize);
        if let Some(got) = others.into_iter().find(|&got| got > max) {
            return Err(Unsupported::Tasks { got, max });
        }
        Ok(plan)
    }

    /// A plan with tiles of the caller's, whatever device it is for.
    ///
    /// # Errors
    /// [`Unsupported`]; [`Unsupported::Tile`] where the problem has an additive mask and the tiles have none for its gradient.
    pub fn with_tile(problem: &Problem, tile: BackwardTile) -> Result<Self, Unsupported> {
        if let Some(why) = problem.no_gradients() {
            return Err(Unsupported::Backward { why });
        }
        if has_bias(problem) && tile.bias.is_none() {
            return Err(Unsupported::Tile { why: "the gradient of a mask has no tile" });
        }
        let (dims, desc) = (problem.dims(), problem.desc());
        let shape = Shape::of(problem, PortableTile::new(8, 16, 1, 1))?;
        let variant = BackwardVariant::of(problem);
        let none = |why: GenericsError| Unsupported::Instance { why: why.to_string() };
        let longest = |of: fn(&Sequence) -> usize| problem.sequences().iter().map(of).max().unwrap_or(0);
        let is_packed = matches!(desc.sequences, Sequences::Packed { .. });
        let kv_rows = if is_packed { 0 } else { dims.kv_len };
        let q_rows = longest(|s| s.q_len).saturating_mul(dims.gqa_group());
        let step = |instance, rows: usize, size: usize| {
            let tiles = rows.div_ceil(size).max(1);
            let heads = count("heads times tiles", dims.kv_heads.saturating_mul(tiles))?;
            let groups = [heads, 1, count("sequences", problem.sequences().len())?];
            Ok::<_, Unsupported>(Step { instance, tiles: count("tiles", tiles)?, groups })
        };
        Ok(Self {
            attend: attend(problem, &shape, Partials { first: 0, others: 0 })?,
            has: Features::of(desc),
            kv_rows: count("keys", kv_rows)?,
            terms: step(variant.terms_instance().map_err(none)?, q_rows, TERM_ROWS as usize)?,
            q: step(variant.q_instance(tile.q).map_err(none)?, q_rows, tile.q.rows())?,
            kv: step(
                variant.kv_instance(tile.kv).map_err(none)?,
                kv_rows.max(longest(|s| s.kv_len)),
                tile.kv.rows(),
            )?,
            bias: match tile.bias.filter(|_| has_bias(problem)) {
                Some(tile) => Some(variant.bias_instance(tile).map_err(none)?),
                None => None,
            },
            sums: sum_rows::specialise(&[]).map_err(none)?,
            problem: problem.clone(),
            tile,
        })
    }

    /// Replaces the instances by native code. Returns `None` if `find` has none for one of them.
    #[must_use]
    pub fn with_native(mut self, find: impl Fn(&Instance) -> Option<Instance>) -> Option<Self> {
        let all = [&mut self.terms.instance, &mut self.q.instance, &mut self.kv.instance, &mut self.sums];
        for instance in all.into_iter().chain(&mut self.bias) {
            *instance = find(instance)?;
        }
        Some(self)
    }

    /// The kernels whose threads follow from their tiles.
    pub(crate) fn tiled(&self) -> impl Iterator<Item = &Instance> {
        [&self.q.instance, &self.kv.instance].into_iter().chain(&self.bias)
    }

    /// Rows of all query heads.
    pub(crate) fn row_count(&self) -> usize {
        self.problem.dims().lse_shape().iter().product()
    }

    /// Sequences, for each of which the workspace has numbers.
    pub(crate) fn sequence_count(&self) -> usize {
        self.problem.sequences().len()
    }

    /// The number of `f32` lists with an element for each row that the workspace has.
    pub(crate) const fn row_lists(&self) -> usize {
        if self.has.has_alibi { 3 } else { 2 }
    }

    /// Bytes of device memory that a run needs beside its tensors.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        4 * (SEQUENCE_WORDS as usize * self.sequence_count() + self.row_lists() * self.row_count())
    }

    /// Threadgroups of the kernels that compute `d_q`, `d_k` and `d_v`. Those of a mask's gradient depend on its shape.
    #[must_use]
    pub fn task_count(&self) -> usize {
        [&self.q, &self.kv].map(|step| step.groups.map(|n| n as usize).iter().product::<usize>()).iter().sum()
    }

    /// The problem whose gradients the plan computes.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// How threadgroups divide their work.
    #[must_use]
    pub const fn tile(&self) -> &BackwardTile {
        &self.tile
    }
}

/// Returns true if the problem has a mask whose gradient may be asked for.
fn has_bias(problem: &Problem) -> bool {
    matches!(problem.desc().mask, Some(MaskKind::Additive(_)))
}
