//! Calls of intrinsics.

use quote::ToTokens;

use super::Lower;
use super::effects::Stands;
use super::literal::adopt;
use crate::intrinsics::{Function, Gives, Takes};
use crate::ir::{Call, Callee, Expr, Kind, Type};

impl Lower<'_> {
    pub(super) fn intrinsic(
        &mut self,
        call: &syn::ExprCall,
        function: &Function,
        expected: Option<&Type>,
        stands: Stands,
    ) -> Expr {
        let mut element = None;
        let mut arguments = Vec::new();
        let mut effect = false;
        for (n, argument) in call.args.iter().enumerate() {
            let takes = function.takes.get(n).copied().unwrap_or(Takes::Any);
            if matches!(takes, Takes::Memory | Takes::MemoryMut) {
                let (value, _) = self.argument(argument, true);
                if let Some(Type::Buffer(of) | Type::Shared(of)) = &value.ty {
                    element = Some((**of).clone());
                } else if value.kind != Kind::Invalid {
                    self.errors
                        .refuse(argument, "the intrinsic works on memory: pass a `Buffer` or a `Shared`");
                }
                effect |= takes == Takes::MemoryMut;
                arguments.push(value);
                continue;
            }
            let wanted = match takes {
                Takes::Same => None,
                Takes::Element => element.clone(),
                _ => takes.ty(),
            };
            let mut value = self.expr(argument, wanted.as_ref(), Stands::Beside);
            if takes == Takes::Element
                && let Some(ty) = &element
            {
                adopt(&mut value, ty);
            }
            arguments.push(value);
        }
        let same = self.same(function.takes, &mut arguments, None, expected, call);
        if effect {
            self.effect(call, stands);
        }
        self.convergence.add_intrinsic(function.convergent);
        let ty = given(function.gives, same.as_ref(), element.as_ref());
        let call = Call {
            callee: Callee::Prelude(function.cpp),
            context: function.context,
            generics: Vec::new(),
            arguments,
        };
        Expr::new(Kind::Call(call), ty)
    }

    /// The type that an intrinsic is generic in, given to the literals among its arguments.
    pub(super) fn same(
        &mut self,
        takes: &[Takes],
        arguments: &mut [Expr],
        receiver: Option<&Expr>,
        expected: Option<&Type>,
        call: &impl ToTokens,
    ) -> Option<Type> {
        let is_same = |n: usize| takes.get(n) == Some(&Takes::Same);
        let known = receiver.and_then(|receiver| receiver.ty.clone()).or_else(|| {
            arguments.iter().enumerate().filter(|(n, _)| is_same(*n)).find_map(|(_, value)| value.ty.clone())
        });
        let known = known.or_else(|| expected.cloned());
        // C++ takes the type from the receiver or the first argument, and converts the others to it.
        let first =
            receiver.is_none().then(|| takes.iter().position(|takes| *takes == Takes::Same)).flatten();
        for (n, value) in arguments.iter_mut().enumerate() {
            if is_same(n) && value.is_untyped() {
                match &known {
                    Some(ty) => adopt(value, ty),
                    None if Some(n) == first => self.errors.refuse(
                        call,
                        "the literal has no type here, and C++ would take `int`: add a suffix, `0u32`",
                    ),
                    None => {}
                }
            }
        }
        known
    }
}

/// The type of a result, where it is known: of an intrinsic that is generic in `same` and works on memory of `element`.
pub(super) fn given(gives: Gives, same: Option<&Type>, element: Option<&Type>) -> Option<Type> {
    match gives {
        Gives::Same => same.cloned(),
        Gives::Unsigned => match same {
            Some(Type::Scalar(scalar)) => Some(Type::Scalar(scalar.unsigned())),
            _ => None,
        },
        Gives::U32 => Some(Type::U32),
        Gives::I32 => Some(Type::I32),
        Gives::F32 => Some(Type::F32),
        Gives::Bool => Some(Type::BOOL),
        Gives::Pair => {
            let two = Expr::new(Kind::Int { value: 2, hex: false }, None);
            Some(Type::Array(Box::new(Type::F32), Box::new(two)))
        }
        Gives::Element => element.cloned(),
        Gives::Nothing | Gives::Bits => None,
    }
}
