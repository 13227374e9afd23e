//! Scalars as strings: in C++, and for readers.

use crate::scalar::ScalarType;
use half::{bf16, f16};

/// A scalar in C++, of exactly the bits `raw`.
pub fn literal(scalar: ScalarType, raw: u64) -> String {
    let float = |x: f32| match x {
        x if x.is_nan() => "ft_nan".to_owned(),
        x if x.is_infinite() => if x > 0.0 { "ft_infinity" } else { "-ft_infinity" }.to_owned(),
        x => format!("{x:e}f"),
    };
    match scalar {
        ScalarType::Bool => (raw != 0).to_string(),
        ScalarType::U8 | ScalarType::U16 => raw.to_string(),
        ScalarType::I8 => (raw as i8).to_string(),
        ScalarType::I16 => (raw as i16).to_string(),
        ScalarType::U32 => format!("{raw}u"),
        // The least values have no literal of their own type.
        ScalarType::I32 if raw as i32 == i32::MIN => "(-2147483647 - 1)".to_owned(),
        ScalarType::I32 => (raw as i32).to_string(),
        ScalarType::U64 | ScalarType::Usize => format!("ulong({raw}ul)"),
        ScalarType::I64 => format!("ft_i64({raw}ul)"),
        ScalarType::F32 => float(f32::from_bits(raw as u32)),
        ScalarType::F16 => format!("FT_F16({raw:#06x}, {})", float(f16::from_bits(raw as u16).to_f32())),
        ScalarType::Bf16 => format!("FT_BF16({raw:#06x}, {})", float(bf16::from_bits(raw as u16).to_f32())),
    }
}

/// A scalar of the bits `raw` for readers.
pub(crate) fn number(scalar: ScalarType, raw: u64) -> String {
    match scalar {
        ScalarType::Bool => (raw != 0).to_string(),
        ScalarType::I8 => (raw as i8).to_string(),
        ScalarType::I16 => (raw as i16).to_string(),
        ScalarType::I32 => (raw as i32).to_string(),
        ScalarType::I64 => (raw as i64).to_string(),
        ScalarType::F32 => f32::from_bits(raw as u32).to_string(),
        ScalarType::F16 => f16::from_bits(raw as u16).to_string(),
        ScalarType::Bf16 => bf16::from_bits(raw as u16).to_string(),
        ScalarType::U8 | ScalarType::U16 | ScalarType::U32 | ScalarType::U64 | ScalarType::Usize => {
            raw.to_string()
        }
    }
}
