//! The two functions that users of candle call most, written by hand over flashtile: this is all that lies between the two libraries.
//! `flashtile_candle` has them with every option, without locks that could deadlock, and with errors that name tensors.
//! A test counts the lines of the adapter and checks its answers.

#![allow(clippy::too_many_arguments)] // as candle has it

// adapter {
use candle_core::{DType, Device, Error, Layout, Result, Storage, StorageRef, Tensor, WithDType, bail};
use flashtile::{Attention, Element, MaskView, TensorView, attention_vec};
use half::{bf16, f16};

fn view<'a, T: WithDType + Element>((memory, l): &'a (StorageRef, &Layout)) -> Result<TensorView<'a>> {
    let Storage::Cpu(storage) = &**memory else { bail!("not on the CPU") };
    let [shape, strides] = [l.dims(), l.stride()].map(|of| of.try_into().map_err(Error::wrap));
    TensorView::strided(&storage.as_slice::<T>()?[l.start_offset()..], shape?, strides?).map_err(Error::wrap)
}

fn fused<T: WithDType + Element>(x: [&Tensor; 3], mask: Option<&Tensor>, o: Attention) -> Result<Tensor> {
    let ([q, k, v], mask) = (x.map(Tensor::storage_and_layout), mask.map(Tensor::storage_and_layout));
    let (q, k, v, mut options) = (view::<T>(&q)?, view::<T>(&k)?, view::<T>(&v)?, o);
    options.mask = mask.as_ref().map(view::<T>).transpose()?.map(MaskView::additive);
    let out: Vec<T> = attention_vec(q, k, v, &options).map_err(Error::wrap)?;
    let ([b, h, s, _], [.., d]) = (q.shape(), v.shape());
    Tensor::from_vec(out, (b, h, s, d), &Device::Cpu)
}

/// `candle_nn::ops::sdpa`
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    let options = if do_causal { Attention::decode() } else { Attention::full() }.scale(scale);
    let options = if softcapping == 1.0 { options } else { options.softcap(softcapping) };
    match q.dtype() {
        DType::F32 => fused::<f32>([q, k, v], mask, options),
        DType::F16 => fused::<f16>([q, k, v], mask, options),
        DType::BF16 => fused::<bf16>([q, k, v], mask, options),
        dtype => bail!("q is {dtype:?}"),
    }
}

/// `candle_flash_attn::flash_attn`
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, causal: bool) -> Result<Tensor> {
    let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
    sdpa(&q, &k, &v, None, causal, scale, 1.0)?.transpose(1, 2)
}
// adapter }

#[allow(clippy::print_stdout)]
fn main() -> Result<()> {
    let (q, kv) = (
        Tensor::randn(0f32, 1.0, (1, 128, 8, 64), &Device::Cpu)?,
        Tensor::randn(0f32, 1.0, (1, 128, 2, 64), &Device::Cpu)?,
    );
    println!("{:?}", flash_attn(&q, &kv, &kv, 0.125, true)?.dims());
    Ok(())
}
