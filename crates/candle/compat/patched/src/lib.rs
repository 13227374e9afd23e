//! A program that calls candle-flash-attn 0.11. Its dependency is the crate of the registry, which needs CUDA to build; the workspace
//! puts flashtile in its place. The types are the signatures of candle-flash-attn 0.11.1: another one would not compile.

#[cfg(test)]
#[allow(clippy::type_complexity, reason = "the types are what is tested")]
mod tests {
    use candle_core::{Device, Result, Tensor};
    use candle_flash_attn::*;

    type Out = Result<Tensor>;
    type Side = Option<usize>;
    type T<'a> = &'a Tensor;

    const _: fn(T, T, T, f32, bool) -> Out = flash_attn;
    const _: fn(T, T, T, f32, Side, Side) -> Out = flash_attn_windowed;
    const _: fn(T, T, T, T, f32, bool) -> Out = flash_attn_alibi;
    const _: fn(T, T, T, T, f32, Side, Side) -> Out = flash_attn_alibi_windowed;
    const _: fn(T, T, T, Option<T>, f32, Side, Side, f32) -> Out = flash_attn_alibi_windowed_softcap;
    const _: fn(T, T, T, T, T, usize, usize, f32, bool) -> Out = flash_attn_varlen;
    const _: fn(T, T, T, T, T, usize, usize, f32, Side, Side) -> Out = flash_attn_varlen_windowed;
    const _: fn(T, T, T, T, T, T, usize, usize, f32, bool) -> Out = flash_attn_varlen_alibi;
    const _: fn(T, T, T, T, T, T, usize, usize, f32, Side, Side) -> Out = flash_attn_varlen_alibi_windowed;
    const _: fn(T, T, T, Option<T>, T, T, usize, usize, f32, Side, Side, f32) -> Out =
        flash_attn_varlen_alibi_windowed_softcap;
    const _: fn(T, T, T, T, T, T, Option<T>, usize, usize, f32, Side, Side, usize, Option<f32>) -> Out =
        flash_attn_varlen_paged_windowed;

    #[test]
    fn the_patch_computes_on_the_cpu() -> Result<()> {
        let x = Tensor::ones((1, 5, 2, 8), candle_core::DType::F32, &Device::Cpu)?;
        let out = flash_attn(&x, &x, &x, 1.0, true)?;
        let far = (out - &x)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(far < 1e-6, "{far}");
        Ok(())
    }

    #[test]
    fn pages_and_packed_sequences() -> Result<()> {
        let list = Tensor::new(&[0u32, 5], &Device::Cpu)?;
        let (q, table) = (
            Tensor::ones((5, 2, 8), candle_core::DType::F32, &Device::Cpu)?,
            Tensor::new(&[[1u32]], &Device::Cpu)?,
        );
        let pages = Tensor::ones((2, 32, 2, 8), candle_core::DType::F32, &Device::Cpu)?;
        let (left, right, cap): (Side, Side, Option<f32>) = (None, Some(0), Some(30.0));
        let ranges: Option<&Tensor> = None;
        let paged = flash_attn_varlen_paged_windowed(
            &q, &pages, &pages, &list, &list, &table, ranges, 5usize, 5usize, 1f32, left, right, 32usize, cap,
        )?;
        let slopes: Option<&Tensor> = None;
        let packed = flash_attn_varlen_alibi_windowed_softcap(
            &q, &q, &q, slopes, &list, &list, 5usize, 5usize, 1f32, left, right, 30f32,
        )?;
        let far = (paged - packed)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(far < 1e-6, "{far}");
        Ok(())
    }
}
