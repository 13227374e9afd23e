//! The functions.

use crate::error::{Error, Result};
use crate::operand::{Mask, Operand, tensor};
use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Tensor, TensorData};
use flashtile::{Attention, Outputs, OwnedTensor, Runner, Step, StepTensors, TensorView};

/// Options of [`attention_with`].
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options<'a> {
    /// Visibility, query offset, scale, softcap, ALiBi, sinks and lengths.
    pub attention: Attention<'a>,
    /// A mask that is true where a key is *hidden*, as burn's are. It broadcasts to `[batch, q_heads, q_len, kv_len]`.
    pub hidden: Option<Tensor<4, Bool>>,
    /// Added to the scores; broadcasts as `hidden` does.
    pub bias: Option<Tensor<4>>,
}

impl<'a> From<Attention<'a>> for Options<'a> {
    fn from(attention: Attention<'a>) -> Self {
        Self { attention, hidden: None, bias: None }
    }
}

/// Stands in for `burn::tensor::module::attention`, with its parameters and conventions: the mask is true where a key is hidden, causality
/// lets the last query sit at the last key, and a query that sees no key gives 0.
///
/// query `[batch, q_heads, q_len, head_dim]`, key `[batch, kv_heads, kv_len, head_dim]` and value `[batch, kv_heads, kv_len, value_dim]` give
/// `[batch, q_heads, q_len, value_dim]`. `q_heads` is a multiple of `kv_heads`: grouped heads are not repeated first.
///
/// ```
/// use burn::tensor::{Device, Tensor, ops::AttentionModuleOptions};
/// let x = Tensor::<4>::ones([1, 2, 3, 16], &Device::flex());
/// let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
/// let out = flashtile_burn::attention(x.clone(), x.clone(), x, None, None, options)?;
/// assert_eq!(out.dims(), [1, 2, 3, 16]);
/// # Ok::<(), flashtile_burn::Error>(())
/// ```
///
/// # Errors
/// The errors of [`attention_with`].
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Result<Tensor<4>> {
    let mut attention = if options.is_causal { Attention::decode() } else { Attention::full() };
    attention.scale = options.scale.map(|scale| scale as f32);
    attention.softcap = options.softcap.map(|softcap| softcap as f32);
    attention_with(query, key, value, Options { attention, hidden: mask, bias: attn_bias })
}

/// [`attention`] with the options of flashtile: windows, any query offset, ALiBi, sinks, lengths of padded and packed sequences.
///
/// Tensors are read in place where the elements of `dim` are contiguous, transposed, narrowed and expanded ones too; others are copied first. A
/// boolean mask costs a byte for each element of its memory.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use flashtile_burn::{attention_with, flashtile::Attention};
/// let x = Tensor::<4>::ones([1, 2, 300, 16], &Device::flex());
/// let out = attention_with(x.clone(), x.clone(), x, Attention::causal().window(127, 0))?;
/// # Ok::<(), flashtile_burn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Backend`] for tensors of another backend, and of a device with autodiff: there is no backward pass. [`Error::Dtype`],
/// [`Error::TwoMasks`], and [`Error::Flashtile`] with the errors of [`flashtile::attention`](flashtile::attention()).
pub fn attention_with<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: impl Into<Options<'a>>,
) -> Result<Tensor<4>> {
    let call = Call::new([q, k, v], options.into())?;
    Ok(tensor(call.run(None)?))
}

/// [`attention_with`], and the logsumexp of each row in F32, `[batch, q_heads, q_len]`: to merge attention over disjoint keys.
///
/// # Errors
/// The errors of [`attention_with`].
pub fn attention_with_lse<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: impl Into<Options<'a>>,
) -> Result<(Tensor<4>, Tensor<3>)> {
    let [batch, heads, rows, _] = q.dims();
    let call = Call::new([q, k, v], options.into())?;
    let mut lse = vec![0.0; batch * heads * rows];
    let out = call.run(Some(&mut lse))?;
    let lse = FlexTensor::from_data(TensorData::new(lse, [batch, heads, rows]));
    Ok((tensor(out), Tensor::from_primitive::<Flex>(lse)))
}

/// Stores the keys and values of a layer in a step of a KV cache, and attends to them and to what the cache holds: q `[1, q_heads, tokens,
/// head_dim]`, k `[1, kv_heads, tokens, head_dim]` and v `[1, kv_heads, tokens, value_dim]` give `[1, q_heads, tokens, value_dim]`, where `tokens`
/// are the new ones, sequence by sequence. The cache may be quantized.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use flashtile_burn::flashtile::{Attention, CacheDesc, CacheLayout, CacheShape, Codec, KvCache, KvCacheExt};
/// let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 };
/// let layout = CacheLayout::Paged { pages: 64, page_size: 16 };
/// let mut cache = KvCache::new(CacheDesc::new(layout, shape, Codec::Int8)).map_err(flashtile_burn::flashtile::Error::from)?;
/// let sequence = cache.create().map_err(flashtile_burn::flashtile::Error::from)?;
/// for tokens in [40, 1, 1] {
///     let (q, kv) = (Tensor::<4>::ones([1, 8, tokens, 64], &Device::flex()), Tensor::<4>::ones([1, 2, tokens, 64], &Device::flex()));
///     let mut step = cache.step(&[(sequence, tokens)])?;
///     let out = flashtile_burn::step_attend(&mut step, 0, [q, kv.clone(), kv], Attention::causal())?;
///     step.finish()?;
/// }
/// # Ok::<(), flashtile_burn::Error>(())
/// ```
///
/// # Errors
/// The errors of [`attention_with`] and of [`Step::attend_with`].
pub fn step_attend<'a>(
    step: &mut Step<'_>,
    layer: usize,
    tensors: [Tensor<4>; 3],
    options: impl Into<Options<'a>>,
) -> Result<Tensor<4>> {
    let call = Call::new(tensors, options.into())?;
    let ([q, k, v], mut out) = (call.views()?, call.out()?);
    let attention = call.attention()?;
    step.attend_with(layer, StepTensors { q, k, v }, &attention, &mut Outputs::new(out.view_mut()))?;
    Ok(tensor(out))
}

/// The tensors and options of a call.
struct Call<'a> {
    tensors: [Operand; 3],
    attention: Attention<'a>,
    mask: Option<Mask>,
}

impl<'a> Call<'a> {
    fn new([q, k, v]: [Tensor<4>; 3], options: Options<'a>) -> Result<Self> {
        let Options { attention, hidden, bias } = options;
        let mask = Mask::new(hidden, bias)?;
        if mask.is_some() && attention.mask.is_some() {
            return Err(Error::TwoMasks);
        }
        let tensors = [Operand::new("q", q)?, Operand::new("k", k)?, Operand::new("v", v)?];
        Ok(Self { tensors, attention, mask })
    }

    fn views(&self) -> Result<[TensorView<'_>; 3]> {
        let [q, k, v] = &self.tensors;
        Ok([q.view()?, k.view()?, v.view()?])
    }

    fn attention(&self) -> Result<Attention<'_>> {
        let mut attention = self.attention;
        if let Some(mask) = &self.mask {
            attention.mask = Some(mask.view()?);
        }
        Ok(attention)
    }

    /// Memory of the result.
    fn out(&self) -> Result<OwnedTensor> {
        let [q, _, v] = self.views()?;
        let [batch, heads, rows, _] = q.shape();
        Ok(OwnedTensor::zeros(q.dtype(), [batch, heads, rows, v.shape()[3]])?)
    }

    fn run(&self, lse: Option<&mut [f32]>) -> Result<OwnedTensor> {
        let ([q, k, v], attention) = (self.views()?, self.attention()?);
        let desc = attention.desc(&q, &k, &v);
        let mut out = self.out()?;
        let mut outputs = Outputs::new(out.view_mut());
        outputs.lse = lse;
        Runner::with_current(|runner| runner.run(&desc, &attention.inputs(q, k, v), &mut outputs))?;
        Ok(out)
    }
}
