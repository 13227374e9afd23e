//! The backward pass of `flashtile run --grad`: the gradients that it reads, those that it writes, and expected ones.

use crate::answers::{fitting, floats, logical};
use crate::backward;
use crate::buffer::Buffer;
use crate::failure::{Failure, Result};
use crate::input::Archive;
use crate::operands::{Operands, Order, Tensor, float_dtype, tensor};
use crate::options::Reading;
use crate::output;
use crate::report;
use crate::timing::Timing;
use flashtile::gradients::bias_shape;
use flashtile::quality::{Report, compare_within};
use flashtile::{AnyBackwardPlan, AnyPlan, Backend, BackwardInputs, Dtype, Gradients, TensorViewMut};
use flashtile_bench::elements::{NonFinite, non_finite};
use safetensors::tensor::{Dtype as StoredDtype, TensorView as StoredView};
use serde_json::{Value, json};

/// Gradients of the results: what a backward pass reads beside the operands.
pub(crate) struct Upstream<'a> {
    d_out: Tensor<'a>,
    d_lse: Option<Vec<f32>>,
}

impl<'a> Upstream<'a> {
    /// Finds the gradients, and checks that they fit the operands.
    pub(crate) fn read(archive: &Archive<'a>, operands: &Operands<'_>, reading: &Reading) -> Result<Self> {
        let (problem, order) = (&operands.problem, operands.order);
        let (dims, dtype) = (problem.dims(), problem.dtype());
        let shape = order.stored(dims.out_shape());
        if !archive.has("d_out") {
            let what = format_args!(
                "tensor d_out is missing, expected the gradient of out, {dtype} {shape:?}, and optionally d_lse"
            );
            return Err(Failure::at("--grad", archive.refuse(what)));
        }
        let d_out = tensor(archive, "d_out", order, reading.dtype)?;
        if d_out.shape != dims.out_shape() {
            let got = order.stored(d_out.shape);
            let what = format_args!("tensor d_out has shape {got:?}, expected {shape:?} to fit q and v");
            return Err(archive.refuse(what));
        }
        if d_out.dtype != dtype {
            let got = d_out.dtype;
            let what = format_args!("tensor d_out is {got}, expected {dtype} as q (--dtype converts it too)");
            return Err(archive.refuse(what));
        }
        let d_lse = fitting(archive, "d_lse", &order.stored_lse(dims.lse_shape()))?;
        let d_lse = d_lse.map(|stored| match stored.dtype {
            StoredDtype::F32 => Ok(floats(stored.bytes.get())),
            got => Err(archive.refuse(format_args!("tensor d_lse is {got:?}, expected F32"))),
        });
        expected_apply(archive, operands)?;
        Ok(Self { d_out, d_lse: d_lse.transpose()? })
    }
}

/// Refuses expected gradients of inputs that the file lacks: nothing would be compared with them.
fn expected_apply(archive: &Archive<'_>, operands: &Operands<'_>) -> Result<()> {
    let inputs = operands.inputs()?;
    let lacking = [
        ("d_sinks", inputs.sinks.is_none(), "sinks"),
        ("d_bias", bias_shape(&inputs).is_none(), "an additive mask"),
        ("d_alibi_slopes", inputs.alibi_slopes.is_none(), "alibi_slopes"),
    ];
    match lacking.into_iter().find(|&(name, lacks, _)| lacks && archive.has(name)) {
        Some((name, _, input)) => Err(archive.refuse(format_args!("tensor {name} is there without {input}"))),
        None => Ok(()),
    }
}

/// A gradient in the order of the file.
struct Gradient {
    name: &'static str,
    dtype: Dtype,
    /// Shape in the file.
    stored: Vec<usize>,
    /// `[batch, heads, rows, dim]`, of the gradients of q, k and v.
    shape: Option<[usize; 4]>,
    buffer: Buffer,
}

impl Gradient {
    /// The gradient of a tensor with a layout.
    fn tensor(name: &'static str, operands: &Operands<'_>, shape: [usize; 4]) -> Result<Self> {
        let dtype = operands.problem.dtype();
        let count = shape.iter().product();
        let (stored, buffer) = (operands.order.stored(shape), Buffer::elements(dtype, count)?);
        Ok(Self { name, dtype, stored, shape: Some(shape), buffer })
    }

    /// The gradient of f32 elements, dense.
    fn floats(name: &'static str, stored: &[usize]) -> Result<Self> {
        let buffer = Buffer::elements(Dtype::F32, stored.iter().product())?;
        Ok(Self { name, dtype: Dtype::F32, stored: stored.to_vec(), shape: None, buffer })
    }

    fn view(&mut self, order: Order) -> Result<TensorViewMut<'_>> {
        let shape = self.shape.unwrap_or_default();
        let view =
            TensorViewMut::from_bytes(self.dtype, self.buffer.bytes_mut(), shape, order.strides(shape));
        view.map_err(Failure::new)
    }

    /// Elements in the order `[batch, heads, rows, dim]`.
    fn values(&self, order: Order) -> Vec<f32> {
        match self.shape {
            Some(shape) => logical(self.buffer.bytes(), self.dtype, order, shape),
            None => floats(self.buffer.bytes()),
        }
    }
}

/// A backward pass that ran.
pub(crate) struct Backward {
    plan: AnyBackwardPlan,
    timing: Timing,
    order: Order,
    /// Gradients of q, k and v.
    tensors: [Gradient; 3],
    /// Gradients of the sinks, the bias and the ALiBi slopes that the problem has.
    lists: [Option<Gradient>; 3],
}

/// A backward pass to be run, without its plan.
pub(crate) struct BackwardJob<'a> {
    pub(crate) backend: &'a dyn Backend,
    /// The plan of the forward pass.
    pub(crate) forward: &'a AnyPlan,
    pub(crate) operands: &'a Operands<'a>,
    pub(crate) upstream: &'a Upstream<'a>,
    /// Results of the forward pass, in the order of the operands.
    pub(crate) out: &'a Buffer,
    pub(crate) lse: &'a Buffer,
}

impl Backward {
    /// Runs and times a backward pass.
    pub(crate) fn run(plan: AnyBackwardPlan, job: &BackwardJob<'_>) -> Result<Self> {
        let BackwardJob { backend, forward, operands, upstream, out, lse } = *job;
        let (order, dims) = (operands.order, operands.problem.dims());
        let inputs = BackwardInputs {
            forward: operands.inputs()?,
            out: operands.out_view(out)?,
            lse: lse.floats(),
            d_out: upstream.d_out.view(order)?,
            d_lse: upstream.d_lse.as_deref(),
        };
        let mut tensors = [
            Gradient::tensor("d_q", operands, dims.q_shape())?,
            Gradient::tensor("d_k", operands, dims.k_shape())?,
            Gradient::tensor("d_v", operands, dims.v_shape())?,
        ];
        let bias = bias_shape(&inputs.forward).and(operands.mask_shape());
        let list =
            |name, shape: Option<&[usize]>| shape.map(|shape| Gradient::floats(name, shape)).transpose();
        let mut lists = [
            list(
                "d_sinks",
                inputs.forward.sinks.map(|sinks| [sinks.len()]).as_ref().map(<[_; 1]>::as_slice),
            )?,
            list("d_bias", bias)?,
            list(
                "d_alibi_slopes",
                inputs.forward.alibi_slopes.map(|slopes| [slopes.len()]).as_ref().map(<[_; 1]>::as_slice),
            )?,
        ];
        let [d_q, d_k, d_v] = &mut tensors;
        let mut gradients = Gradients::new(d_q.view(order)?, d_k.view(order)?, d_v.view(order)?);
        let [d_sinks, d_bias, d_alibi_slopes] =
            lists.each_mut().map(|list| list.as_mut().map(|of| of.buffer.floats_mut()));
        (gradients.d_sinks, gradients.d_bias, gradients.d_alibi_slopes) = (d_sinks, d_bias, d_alibi_slopes);

        let mut run = backend.timed_backward(&plan, &inputs, &gradients)?;
        let (unit, work) = (backend.backward_unit(&plan), backward::work(forward));
        let timing = Timing::measure(backend, unit, work, || Ok(run.seconds(&mut gradients)?))?;
        run.download(&mut gradients)?;
        drop(run);
        Ok(Self { plan, timing, order, tensors, lists })
    }

    fn all(&self) -> impl Iterator<Item = &Gradient> {
        self.tensors.iter().chain(self.lists.iter().flatten())
    }

    /// The gradients as tensors of the output file.
    pub(crate) fn outputs(&self) -> Result<Vec<(&'static str, StoredView<'_>)>> {
        let mut outputs = Vec::new();
        for of in self.all() {
            outputs.push((of.name, output::tensor(of.dtype, &of.stored, of.buffer.bytes())?));
        }
        Ok(outputs)
    }

    /// Elements that are not finite: names and numbers.
    fn non_finite(&self) -> Vec<(&'static str, NonFinite)> {
        let count = |of: &Gradient| (of.name, non_finite(of.dtype, of.buffer.bytes()));
        let some = |found: &NonFinite| found.nan + found.positive + found.negative > 0;
        self.all().map(count).filter(|(_, found)| some(found)).collect()
    }

    /// The lines of the report: kernel, shapes, time, rate and fraction of the limit, and elements that are not finite.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let shapes: Vec<String> = self.all().map(|of| format!("{} {:?}", of.name, of.stored)).collect();
        let timing = &self.timing;
        let line = format!(
            "{}, {}: {}, {}, {}",
            self.plan.kernel(),
            shapes.join(" "),
            timing.words(),
            timing.flop_rate(),
            timing.reached()
        );
        let mut lines = vec![("backward", line)];
        let count = |(name, found): (&str, NonFinite)| {
            format!("{name} has {} NaN and {} infinite", found.nan, found.positive + found.negative)
        };
        let non_finite: Vec<String> = self.non_finite().into_iter().map(count).collect();
        lines.extend((!non_finite.is_empty()).then(|| ("non-finite", non_finite.join(", "))));
        lines
    }

    pub(crate) fn json(&self) -> Value {
        let mut json = backward::json(&self.plan);
        let non_finite = self.non_finite().into_iter().map(|(name, found)| {
            let infinite = found.positive + found.negative;
            (name.to_owned(), json!({"nan": found.nan, "infinite": infinite}))
        });
        let shapes = self.all().map(|of| (of.name.to_owned(), json!(of.stored)));
        if let (Some(all), Value::Object(timing)) = (json.as_object_mut(), self.timing.json()) {
            all.extend(timing);
            all.insert("unit".to_owned(), json!(self.timing.unit.as_ref().map(|unit| &unit.name)));
            all.insert("shapes".to_owned(), Value::Object(shapes.collect()));
            all.insert("non_finite".to_owned(), Value::Object(non_finite.collect()));
        }
        json
    }

    /// Compares the gradients with the expected ones of the file, if it has any.
    pub(crate) fn compare(&self, archive: &Archive<'_>) -> Result<Vec<Distance>> {
        let of = |of: &Gradient| Distance::new(archive, of, self.order).transpose();
        self.all().filter_map(of).collect()
    }
}

/// How far a gradient is from the file's. No limit applies: the terms of a gradient may cancel, so that rounding is large beside it.
pub(crate) struct Distance {
    name: &'static str,
    report: Report,
}

impl Distance {
    /// `None` if the file lacks the gradient.
    fn new(archive: &Archive<'_>, got: &Gradient, order: Order) -> Result<Option<Self>> {
        let Some(stored) = fitting(archive, got.name, &got.stored)? else { return Ok(None) };
        let want: Vec<f64> = match (stored.dtype, float_dtype(stored.dtype), got.shape) {
            (StoredDtype::F64, ..) => doubles(stored.bytes.get(), order, got.shape),
            (_, Some(dtype), Some(shape)) => wide(&logical(stored.bytes.get(), dtype, order, shape)),
            (StoredDtype::F32, Some(_), None) => wide(&floats(stored.bytes.get())),
            (other, _, shape) => {
                let expected = if shape.is_some() { "F64, F32, F16 or BF16" } else { "F64 or F32" };
                let what = format_args!("tensor {} is {other:?}, expected {expected}", got.name);
                return Err(archive.refuse(what));
            }
        };
        let ones = vec![1.0; want.len()];
        let report = compare_within(&got.values(order), &want, &ones, got.dtype);
        Ok(Some(Self { name: got.name, report }))
    }

    /// All distances in one line; `None` if there are none.
    pub(crate) fn words(all: &[Self]) -> Option<String> {
        let one = |of: &Self| format!("{} {:.1e}", of.name, of.report.nrmse);
        let all: Vec<String> = all.iter().map(one).collect();
        (!all.is_empty()).then(|| format!("nrmse of {} (no limit)", all.join(", ")))
    }

    /// All distances by name.
    pub(crate) fn json(all: &[Self]) -> Value {
        let one =
            |of: &Self| (of.name.to_owned(), json!({"nrmse": of.report.nrmse, "max_abs": of.report.max_abs}));
        Value::Object(all.iter().map(one).collect())
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Elements of f64, in the order `[batch, heads, rows, dim]` if they have a layout.
fn doubles(bytes: &[u8], order: Order, shape: Option<[usize; 4]>) -> Vec<f64> {
    let all: Vec<f64> = bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
    let Some(shape) = shape else { return all };
    let ([batch, heads, rows, dim], [sb, sh, ss, _]) = (shape, order.strides(shape));
    let row = |n: usize| {
        let (head, i) = (n / rows, n % rows);
        let first = head / heads * sb + head % heads * sh + i * ss;
        &all[first..first + dim]
    };
    (0..batch * heads * rows).flat_map(row).copied().collect()
}

/// The note about gradients of results that are not read, because nobody asked for a backward pass.
pub(crate) fn remark(archive: &Archive<'_>) -> Option<Failure> {
    let given: Vec<&str> = ["d_out", "d_lse"].into_iter().filter(|name| archive.has(name)).collect();
    let names = report::some(&given);
    (!given.is_empty())
        .then(|| archive.refuse(format_args!("note: tensors not read: {names} (--grad computes gradients)")))
}
