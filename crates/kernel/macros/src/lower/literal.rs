//! Literals, and the types that their neighbours give them.

use super::Lower;
use crate::ir::{Expr, Kind, Scalar, Type};

impl Lower<'_> {
    pub(super) fn literal(&mut self, literal: &syn::Lit, expected: Option<&Type>) -> Expr {
        let reason = match literal {
            syn::Lit::Int(int) => return self.int(int, expected),
            syn::Lit::Float(float) => match float.suffix() {
                "" | "f32" => {
                    let digits = float.base10_digits().to_string();
                    return Expr::new(Kind::Float(digits), Some(Type::F32));
                }
                _ => "f64 does not exist on Apple's GPUs: write f32",
            },
            syn::Lit::Bool(flag) => return Expr::new(Kind::Bool(flag.value), Some(Type::BOOL)),
            syn::Lit::Str(_) | syn::Lit::ByteStr(_) | syn::Lit::CStr(_) => "strings do not exist on GPUs",
            syn::Lit::Char(_) => "char does not exist on GPUs: write the number",
            syn::Lit::Byte(byte) => {
                let kind = Kind::Int { value: u64::from(byte.value()), hex: false };
                return Expr::new(kind, Some(Type::Scalar(Scalar::U8)));
            }
            _ => "the literal is not part of the kernel language",
        };
        self.refuse(literal, reason)
    }

    fn int(&mut self, int: &syn::LitInt, expected: Option<&Type>) -> Expr {
        // In a generic argument the sign is part of the literal.
        if let Some(digits) = int.base10_digits().strip_prefix('-') {
            let magnitude = syn::LitInt::new(&format!("{digits}{}", int.suffix()), int.span());
            let magnitude = self.int(&magnitude, expected);
            let ty = magnitude.ty.clone();
            return settled(Expr::new(Kind::Neg(Box::new(magnitude)), ty));
        }
        let suffix = int.suffix();
        if suffix == "f32" {
            return Expr::new(Kind::Float(int.base10_digits().to_string()), Some(Type::F32));
        }
        let ty = match (suffix, Scalar::of(suffix)) {
            ("", _) => match expected {
                Some(Type::Scalar(scalar)) if scalar.is_integer() => Some(Type::Scalar(*scalar)),
                _ => None,
            },
            (_, Some(scalar)) => Some(Type::Scalar(scalar)),
            ("f64", _) => {
                return self.refuse(int, "f64 does not exist on Apple's GPUs: write f32");
            }
            ("isize", _) => {
                return self.refuse(int, "isize differs between machines: use i32 or i64");
            }
            _ => {
                return self.refuse(int, "GPUs have no integer of this type: use u64 or i64");
            }
        };
        let Ok(value) = int.base10_digits().parse::<u64>() else {
            return self.refuse(int, "integers have at most 64 bits");
        };
        let text = int.to_string();
        let hex = text.starts_with("0x") || text.starts_with("0b");
        Expr::new(Kind::Int { value, hex }, ty)
    }
}

/// The least and the greatest value of an expression of literals without a type, and whether it and all its parts fit an i32.
fn extent(value: &Expr) -> Option<(i128, i128, bool)> {
    let is_i32 = |x: i128| i32::try_from(x).is_ok();
    let (least, greatest, narrow) = match &value.kind {
        Kind::Int { value, .. } => (i128::from(*value), i128::from(*value), true),
        Kind::Neg(operand) => {
            // The least i32 is the negative of a literal that fits no i32.
            let (least, greatest, narrow) = match &operand.kind {
                Kind::Int { value, .. } => (i128::from(*value), i128::from(*value), true),
                _ => extent(operand)?,
            };
            (-greatest, -least, narrow)
        }
        Kind::Choose(_, a, b) => {
            let (a, b) = (extent(a)?, extent(b)?);
            (a.0.min(b.0), a.1.max(b.1), a.2 && b.2)
        }
        _ => return None,
    };
    Some((least, greatest, narrow && is_i32(least) && is_i32(greatest)))
}

/// Returns true if a literal of an expression is negated.
fn has_sign(value: &Expr) -> bool {
    match &value.kind {
        Kind::Neg(_) => true,
        Kind::Choose(_, a, b) => has_sign(a) || has_sign(b),
        _ => false,
    }
}

/// Makes literals without a type i64, where one is negative and one does not fit an i32: no other integer type has both. C++ would
/// make digits above the greatest i32 unsigned.
pub(super) fn settled(mut value: Expr) -> Expr {
    let is_i64 = value.is_untyped() && has_sign(&value) && extent(&value).is_some_and(|(.., narrow)| !narrow);
    if is_i64 {
        adopt(&mut value, &Type::I64);
    }
    value
}

/// Gives the type to literals that have none.
pub(super) fn adopt(value: &mut Expr, ty: &Type) {
    match &mut value.kind {
        Kind::Int { .. } if value.ty.is_none() => value.ty = Some(ty.clone()),
        Kind::Neg(operand) if value.ty.is_none() => {
            adopt(operand, ty);
            value.ty = Some(ty.clone());
        }
        Kind::Choose(_, a, b) if value.ty.is_none() => {
            adopt(a, ty);
            adopt(b, ty);
            value.ty = Some(ty.clone());
        }
        _ => {}
    }
}
