//! Workloads of the backward pass: sessions of the library over seeded tensors, and the oracle's gradients of the last head.

use super::data::{Find, Want, elements, fill, random_value, size};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::gradients::{BackwardInputs, Gradients};
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::{Dims, Problem, ProblemDesc};
use flashtile_core::reference::{self, AttentionGradients};
use flashtile_core::tensor::{MaskView, TensorView, TensorViewMut, dense};
use flashtile_cpu::cpu::Cpu;
use flashtile_gpu::backward::plan::PortableBackwardPlan;
use flashtile_gpu::backward::tile::{BackwardTile, small_tile};
use flashtile_gpu::engine::PortableEngine;
use flashtile_gpu::session::Session;
use flashtile_gpu::tile::PortableTile;
use flashtile_gpu::uploaded_backward::UploadedBackwardRun;
use flashtile_gpu::uploaded_run::Repeated;
use flashtile_kernel::HostAccess;
use flashtile_kernel::source::Shape;

const DTYPE: Dtype = Dtype::BF16;

fn message(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The gradient that is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    DQ,
    DK,
    DBias,
    DSinks,
}

/// A problem with its tensors and the results of its forward pass.
pub(super) struct Work {
    problem: Problem,
    answer: Answer,
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    d_out: Vec<u8>,
    out: Vec<u8>,
    lse: Vec<f32>,
    sinks: Vec<f32>,
    /// `[1, heads, rows, keys]`.
    mask: Vec<f32>,
}

/// A [`Work`] whose tensors lie in the memory of a device.
pub(super) struct Placed<D: HostAccess> {
    run: UploadedBackwardRun<PortableEngine<D>>,
    work: Made,
}

/// Memory of the host for gradients.
struct Made {
    problem: Problem,
    answer: Answer,
    d_q: Vec<u8>,
    d_k: Vec<u8>,
    d_v: Vec<u8>,
    d_sinks: Vec<f32>,
    d_bias: Vec<f32>,
}

fn tensor(bytes: &[u8], shape: [usize; 4]) -> Result<TensorView<'_>, String> {
    TensorView::from_bytes(DTYPE, bytes, shape, dense(shape)).map_err(message)
}

fn tensor_mut(bytes: &mut [u8], shape: [usize; 4]) -> Result<TensorViewMut<'_>, String> {
    TensorViewMut::from_bytes(DTYPE, bytes, shape, dense(shape)).map_err(message)
}

fn bytes_of(shape: [usize; 4]) -> usize {
    DTYPE.bytes() * shape.iter().product::<usize>()
}

impl Made {
    fn new(work: &Work) -> Self {
        let dims = work.problem.dims();
        let zeros = |shape| vec![0; bytes_of(shape)];
        Self {
            problem: work.problem.clone(),
            answer: work.answer,
            d_q: zeros(dims.q_shape()),
            d_k: zeros(dims.k_shape()),
            d_v: zeros(dims.v_shape()),
            d_sinks: vec![0.0; work.sinks.len()],
            d_bias: vec![0.0; work.mask.len()],
        }
    }

    fn gradients(&mut self) -> Result<Gradients<'_>, String> {
        let dims = *self.problem.dims();
        let mut gradients = Gradients::new(
            tensor_mut(&mut self.d_q, dims.q_shape())?,
            tensor_mut(&mut self.d_k, dims.k_shape())?,
            tensor_mut(&mut self.d_v, dims.v_shape())?,
        );
        gradients.d_sinks = (self.answer == Answer::DSinks).then_some(&mut self.d_sinks);
        gradients.d_bias = (self.answer == Answer::DBias).then_some(&mut self.d_bias);
        Ok(gradients)
    }

    fn answer(&self) -> Vec<f64> {
        let wide = |bytes: &[u8]| -> Vec<f64> {
            bytes.as_chunks().0.iter().map(|x| half::bf16::from_ne_bytes(*x).to_f64()).collect()
        };
        match self.answer {
            Answer::DQ => wide(&self.d_q),
            Answer::DK => wide(&self.d_k),
            Answer::DBias => self.d_bias.iter().map(|&x| f64::from(x)).collect(),
            Answer::DSinks => self.d_sinks.iter().map(|&x| f64::from(x)).collect(),
        }
    }
}

impl Work {
    fn inputs(&self) -> Result<Inputs<'_>, String> {
        let dims = self.problem.dims();
        let [q, k, v] = [(&self.q, dims.q_shape()), (&self.k, dims.k_shape()), (&self.v, dims.v_shape())]
            .map(|(bytes, shape)| tensor(bytes, shape));
        let mut inputs = Inputs::new(q?, k?, v?);
        inputs.sinks = (!self.sinks.is_empty()).then_some(&self.sinks);
        if !self.mask.is_empty() {
            inputs.mask = Some(mask_of(&self.mask, dims)?);
        }
        Ok(inputs)
    }

    /// Computes out and lse.
    fn with_forward(mut self) -> Result<Self, String> {
        let (cpu, shape) = (Cpu::new(), self.problem.dims().out_shape());
        let plan = cpu.plan(&self.problem, PlanOptions::default()).map_err(message)?;
        let (mut out, mut lse) = (vec![0; bytes_of(shape)], vec![0.0; shape[..3].iter().product()]);
        let mut outputs = Outputs::new(tensor_mut(&mut out, shape)?);
        outputs.lse = Some(&mut lse);
        let mut workspace = plan.try_workspace().map_err(message)?;
        cpu.run(&plan, &self.inputs()?, &mut outputs, &mut workspace).map_err(message)?;
        (self.out, self.lse) = (out, lse);
        Ok(self)
    }

    pub(super) fn place<D: HostAccess>(&self, device: D, find: Option<Find>) -> Result<Placed<D>, String> {
        let dims = self.problem.dims();
        let inputs = BackwardInputs {
            forward: self.inputs()?,
            out: tensor(&self.out, dims.out_shape())?,
            lse: &self.lse,
            d_out: tensor(&self.d_out, dims.out_shape())?,
            d_lse: None,
        };
        let tile = match find {
            Some(_) => small_tile(dims.head_dim),
            None => BackwardTile::default_for(&self.problem).map_err(message)?,
        };
        let plan = PortableBackwardPlan::with_tile(&self.problem, tile).map_err(message)?;
        let plan = match find {
            Some(find) => plan.with_native(find).ok_or("no native code of the shape")?,
            None => plan,
        };
        let engine = PortableEngine::with_tiling(PortableTile::new(8, 16, 2, 1));
        let mut work = Made::new(self);
        let run = UploadedBackwardRun::new(Session::new(device, engine), plan, &inputs, &work.gradients()?);
        Ok(Placed { run: run.map_err(message)?, work })
    }
}

/// The first elements of a list as a mask over sequences.
fn mask_of<'a>(mask: &'a [f32], dims: &Dims) -> Result<MaskView<'a>, String> {
    let shape = [1, dims.q_heads, dims.q_len, dims.kv_len];
    MaskView::dense_additive(&mask[..shape.iter().product()], shape).map_err(message)
}

impl<D: HostAccess> Placed<D> {
    pub(super) fn launch(&mut self) -> Result<(), String> {
        self.run.launch().map_err(message)
    }

    pub(super) fn answer(&mut self) -> Result<Vec<f64>, String> {
        self.run.download(&mut self.work.gradients()?).map_err(message)?;
        Ok(self.work.answer())
    }
}

/// Sizes of a problem of equal sequences.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    length: usize,
    heads: usize,
    dim: usize,
}

impl Sizes {
    fn problem(self, answer: Answer) -> Result<Problem, String> {
        let Self { batch, length, heads, dim } = self;
        let (kv_heads, q_len, kv_len) = (heads, length, length);
        let dims = Dims { batch, q_heads: heads, kv_heads, q_len, kv_len, head_dim: dim, value_dim: dim };
        let mut desc = ProblemDesc::new(dims, DTYPE);
        desc.mask = (answer == Answer::DBias).then_some(MaskKind::Additive(Dtype::F32));
        desc.sinks = answer == Answer::DSinks;
        desc.validate().map_err(message)
    }

    fn job(self, answer: Answer) -> Result<(Want, Work), String> {
        let Self { batch, length, heads, dim } = self;
        let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| {
            let mut bytes = vec![0u8; bytes_of([batch, heads, length, dim])];
            elements(&mut bytes, DTYPE, seed);
            bytes
        });
        let floats = |count: usize, seed| {
            let mut list = vec![0.0; count];
            fill(&mut list, seed, random_value);
            list
        };
        let sinks = floats(if answer == Answer::DSinks { heads } else { 0 }, 5);
        let mask = floats(if answer == Answer::DBias { heads * length * length } else { 0 }, 6);
        let (problem, out, lse) = (self.problem(answer)?, Vec::new(), Vec::new());
        let work = Work { problem, answer, q, k, v, d_out, out, lse, sinks, mask }.with_forward()?;
        Ok((self.want(&work)?, work))
    }

    /// The oracle's gradients of the last head.
    fn want(self, work: &Work) -> Result<Want, String> {
        let Self { batch, length, heads, dim } = self;
        let of_head = |at: usize| -> Result<AttentionGradients, String> {
            let one = Self { batch: 1, heads: 1, ..self }.problem(work.answer)?;
            let start = DTYPE.bytes() * at * length * dim;
            let [q, k, v, d_out] = [&work.q, &work.k, &work.v, &work.d_out]
                .map(|bytes| tensor(&bytes[start..], one.dims().q_shape()));
            let mut inputs = Inputs::new(q?, k?, v?);
            inputs.sinks = work.sinks.get(at % heads..=at % heads);
            if !work.mask.is_empty() {
                inputs.mask = Some(mask_of(&work.mask[at % heads * length * length..], one.dims())?);
            }
            reference::backward(&one, &inputs, &d_out?, None).map_err(message)
        };
        let last = batch * heads - 1;
        let rows = last * length * dim;
        Ok(match work.answer {
            Answer::DQ => vec![(rows, of_head(last)?.d_q)],
            Answer::DK => vec![(rows, of_head(last)?.d_k)],
            Answer::DBias => vec![((heads - 1) * length * length, of_head(last)?.d_bias)],
            Answer::DSinks => {
                let of_batch = |entry: usize| Ok::<_, String>(of_head(entry * heads + heads - 1)?.d_sinks[0]);
                let sum = (0..batch).map(of_batch).sum::<Result<f64, String>>()?;
                vec![(heads - 1, vec![sum])]
            }
        })
    }
}

/// The kernels that multiply: [`backward_q()`](flashtile_gpu::kernels::backward::d_q::backward_q()),
/// [`backward_kv()`](flashtile_gpu::kernels::backward::d_kv::backward_kv()) and
/// [`backward_bias()`](flashtile_gpu::kernels::backward::d_bias::backward_bias()).
pub(super) fn products(shape: &Shape, answer: Answer) -> Result<(Want, Work), String> {
    let [batch, length, heads, dim] = ["batch", "length", "heads", "dim"].map(|name| size(shape, name));
    Sizes { batch: batch?, length: length?, heads: heads?, dim: dim? }.job(answer)
}

/// Queries of a sequence whose rows are summed, and its keys: the oracle computes all of them.
const SUMMED_LENGTH: usize = 512;

/// Terms of rows, of [`row_terms()`](flashtile_gpu::kernels::backward::row_terms::row_terms()).
pub(super) fn terms(shape: &Shape) -> Result<(Want, Work), String> {
    let (rows, dim) = (size(shape, "rows")?, size(shape, "dim")?);
    let length = rows.min(SUMMED_LENGTH);
    Sizes { batch: 1, length, heads: rows / length, dim }.job(Answer::DQ)
}

/// Sums over rows, of [`sum_rows()`](flashtile_gpu::kernels::backward::sum_rows::sum_rows()).
pub(super) fn sums(shape: &Shape) -> Result<(Want, Work), String> {
    let (rows, heads) = (size(shape, "rows")?, size(shape, "heads")?);
    let length = rows.min(SUMMED_LENGTH);
    Sizes { batch: rows / length, length, heads, dim: 64 }.job(Answer::DSinks)
}
