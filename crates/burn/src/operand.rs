//! Tensors of burn as views of flashtile.

use crate::error::{Error, Result};
use burn::backend::Flex;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bool, BoolStore, DType, Tensor, TensorData};
use flashtile::tensor::reach;
use flashtile::{Dtype, MaskView, OwnedTensor, TensorView};
use half::{bf16, f16};

/// A tensor of rank 4, read where it lies.
pub(crate) struct Operand {
    tensor: FlexTensor,
    pub(crate) dtype: Dtype,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl Operand {
    pub(crate) fn new(name: &'static str, tensor: Tensor<4>) -> Result<Self> {
        let shape = tensor.dims();
        let backend = |error| Error::Backend { tensor: name, found: format!("{error:?}") };
        let tensor = tensor.try_into_primitive::<Flex>().map_err(backend)?;
        let dtype = match tensor.dtype() {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            got => return Err(Error::Dtype { tensor: name, got }),
        };
        let (tensor, strides) = readable(tensor, |inner| inner == 1);
        Ok(Self { tensor, dtype, shape, strides })
    }

    pub(crate) fn view(&self) -> Result<TensorView<'_>> {
        let bytes = from_start(&self.tensor, self.dtype.bytes());
        Ok(TensorView::from_bytes(self.dtype, bytes, self.shape, self.strides)?)
    }
}

/// Strides in elements; none where one is negative. An axis of one element has any stride, and gets 1.
fn strides(layout: &Layout) -> Option<[usize; 4]> {
    let mut strides = [1; 4];
    for (axis, stride) in strides.iter_mut().enumerate() {
        if layout.shape()[axis] > 1 {
            *stride = usize::try_from(layout.strides()[axis]).ok()?;
        }
    }
    Some(strides)
}

/// The tensor with its strides, or a dense copy where the strides cannot be read, or the last one does not fit.
fn readable(tensor: FlexTensor, fits: impl Fn(usize) -> bool) -> (FlexTensor, [usize; 4]) {
    match strides(tensor.layout()) {
        Some(strides) if fits(strides[3]) => (tensor, strides),
        _ => {
            let dense = tensor.to_contiguous();
            let strides = flashtile::tensor::dense(dense.layout().shape().dims());
            (dense, strides)
        }
    }
}

/// The bytes of a tensor from its first element on.
fn from_start(tensor: &FlexTensor, bytes: usize) -> &[u8] {
    let start = tensor.layout().start_offset().saturating_mul(bytes);
    tensor.bytes().get(start..).unwrap_or_default()
}

/// The mask of a call: hidden keys, a bias, or both in one.
pub(crate) enum Mask {
    /// A byte for each element of the tensor's memory: 1 is visible.
    Visible {
        bytes: Vec<u8>,
        shape: [usize; 4],
        strides: [usize; 4],
    },
    Bias(Operand),
}

impl Mask {
    /// The mask of tensors in which true is hidden, and of biases.
    pub(crate) fn new(hidden: Option<Tensor<4, Bool>>, bias: Option<Tensor<4>>) -> Result<Option<Self>> {
        match (hidden, bias) {
            (None, None) => Ok(None),
            (None, Some(bias)) => Ok(Some(Self::Bias(Operand::new("attn_bias", bias)?))),
            (Some(hidden), None) => Self::visible(hidden).map(Some),
            (Some(hidden), Some(bias)) => {
                let (of_mask, of_bias) = (hidden.dims(), bias.dims());
                // Axes that do not broadcast are for flashtile to refuse, against the axes of q and k.
                let both: [usize; 4] = std::array::from_fn(|axis| of_mask[axis].max(of_bias[axis]));
                let fits = |of: [usize; 4]| of.iter().zip(both).all(|(&n, all)| n == all || n == 1);
                if !fits(of_mask) || !fits(of_bias) {
                    let error = flashtile::RunError::MaskShape { expected: of_bias, got: of_mask };
                    return Err(error.into());
                }
                let bias = bias.expand(both).mask_fill(hidden.expand(both), f32::NEG_INFINITY);
                Ok(Some(Self::Bias(Operand::new("attn_bias", bias)?)))
            }
        }
    }

    fn visible(hidden: Tensor<4, Bool>) -> Result<Self> {
        let shape = hidden.dims();
        let backend = |error| Error::Backend { tensor: "mask", found: format!("{error:?}") };
        let tensor = hidden.try_into_primitive::<Flex>().map_err(backend)?;
        match tensor.dtype() {
            DType::Bool(BoolStore::Native | BoolStore::U8) => {}
            got => return Err(Error::Dtype { tensor: "mask", got }),
        }
        let (tensor, strides) = readable(tensor, |inner| inner <= 1);
        let len = reach(shape, strides)?;
        let bytes = from_start(&tensor, 1).iter().take(len).map(|&hidden| u8::from(hidden == 0)).collect();
        Ok(Self::Visible { bytes, shape, strides })
    }

    pub(crate) fn view(&self) -> Result<MaskView<'_>> {
        match self {
            Self::Visible { bytes, shape, strides } => Ok(MaskView::bool_bytes(bytes, *shape, *strides)?),
            Self::Bias(bias) => Ok(MaskView::additive(bias.view()?)),
        }
    }
}

/// A result as a tensor of burn.
pub(crate) fn tensor(result: OwnedTensor) -> Tensor<4> {
    let (dtype, shape) = (result.dtype(), result.shape());
    let data = match dtype {
        Dtype::F32 => result.into_vec::<f32>().map(|elements| TensorData::new(elements, shape)),
        Dtype::F16 => result.into_vec::<f16>().map(|elements| TensorData::new(elements, shape)),
        Dtype::BF16 => result.into_vec::<bf16>().map(|elements| TensorData::new(elements, shape)),
    };
    match data {
        Ok(data) => Tensor::from_primitive::<Flex>(FlexTensor::from_data(data)),
        Err(_) => unreachable!("the elements are asked for by their own type"),
    }
}
