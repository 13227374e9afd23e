//! Calls of functions.

use syn::spanned::Spanned;

use super::Lower;
use super::effects::Stands;
use super::path::{looks_like_type, of_std, without_last};
use crate::intrinsics::{self, Convergent};
use crate::ir::{Call, Callee, Expr, Generic, Kind, Passed, Scalar, Type};
use crate::names;
use crate::node::NodeId;
use crate::syntax::{module_of, strip};

impl Lower<'_> {
    pub(super) fn call(&mut self, call: &syn::ExprCall, expected: Option<&Type>, stands: Stands) -> Expr {
        let path = match strip(&call.func) {
            syn::Expr::Path(path) if path.qself.is_none() => &path.path,
            other => {
                return self.refuse(other, "functions are called by their names: this expression is not one");
            }
        };
        let mut segments = path.segments.iter().rev();
        let Some(last) = segments.next() else { return Expr::invalid() };
        let name = last.ident.to_string();
        match segments.next() {
            None => {
                if self.scopes.find(&name).is_some() {
                    return self.refuse(
                        path,
                        "function values do not exist on GPUs: call a #[device] function by its name",
                    );
                }
                if name == "shared" {
                    return self.refuse(
                        call,
                        "a threadgroup array is bound to a variable: `let mut tile: Shared<f32> = shared(N);`",
                    );
                }
                if let Some(function) = intrinsics::function(&name) {
                    if !last.arguments.is_none() {
                        self.errors
                            .refuse(&last.arguments, "the arguments have the types: leave them out here");
                    }
                    self.depends.own_name(&last.ident);
                    return self.intrinsic(call, function, expected, stands);
                }
                if name == self.name {
                    return self.refuse(path, "recursion does not exist on GPUs: write a loop");
                }
            }
            Some(owner) => {
                if let Some(ty) = self.scalar_path(path) {
                    return self.associated(call, ty, &name);
                }
                if owner.ident == "Fragment" {
                    self.depends.own_generic(&without_last(path));
                    return self.fragment(call, owner, &name);
                }
                if looks_like_type(&owner.ident.to_string()) {
                    return self.refuse(
                        path,
                        "associated functions are not part of the kernel language: write a #[device] function",
                    );
                }
            }
        }
        self.device_call(call, path, stands)
    }

    fn device_call(&mut self, call: &syn::ExprCall, path: &syn::Path, stands: Stands) -> Expr {
        let Some(last) = path.segments.last() else { return Expr::invalid() };
        let name = last.ident.to_string();
        if looks_like_type(&name) {
            return self.refuse(
                path,
                "tuple structs and enums are not part of the kernel language: use named fields",
            );
        }
        if of_std(path) {
            return self.refuse(
                path,
                "functions of the standard library do not exist on GPUs: write the method or intrinsic, or a #[device] function",
            );
        }
        let generics = self.reader().arguments(&last.arguments).unwrap_or_default();
        if generics.is_empty() {
            self.depends.deducible(path);
        }
        let mut effect = false;
        let mut arguments = Vec::new();
        for (n, argument) in call.args.iter().enumerate() {
            let (value, mutable) = self.argument(argument, true);
            effect |= mutable;
            if value.is_untyped() {
                self.depends.typed_argument(path, n, argument.span());
            }
            arguments.push(value);
        }
        if effect {
            self.effect(call, stands);
        } else if stands == Stands::Beside {
            self.depends.without_barrier(path);
        }
        self.convergence.add_function(module_of(path));
        self.annotations.device_calls.extend(NodeId::of(&call.attrs));
        self.depends.item(path);
        let callee = Callee::Device(names::global(&name));
        Expr::new(Kind::Call(Call { callee, context: true, generics, arguments }), None)
    }

    /// An argument of a function, and whether the function may write to it.
    pub(super) fn argument(&mut self, argument: &syn::Expr, values_by_reference: bool) -> (Expr, bool) {
        let (inner, mutable) = match strip(argument) {
            syn::Expr::Reference(reference) => (&*reference.expr, Some(reference.mutability.is_some())),
            other => (other, None),
        };
        let inner = match (mutable, strip(inner)) {
            // `&mut *x` passes on what `x` borrows.
            (Some(_), syn::Expr::Unary(syn::ExprUnary { op: syn::UnOp::Deref(_), expr, .. })) => &**expr,
            _ => inner,
        };
        let Some(mutable) = mutable else {
            let value = self.expr(inner, None, Stands::Beside);
            let writes = matches!(self.passed(inner), Some(Passed::MemoryMut | Passed::Reference));
            return (value, writes);
        };
        let mut base = strip(inner);
        while let syn::Expr::Field(field) = base {
            base = strip(&field.base);
        }
        let element = matches!(base, syn::Expr::Index(_)) && !mutable && !values_by_reference;
        if !matches!(base, syn::Expr::Path(_)) && !element {
            self.errors
                .refuse(argument, "elements cannot be borrowed: pass the memory or the array, and the index");
            return (Expr::invalid(), mutable);
        }
        let value = self.expr(inner, None, Stands::Beside);
        let is_memory = matches!(value.ty, Some(Type::Buffer(_) | Type::Shared(_)));
        if !mutable && !is_memory && values_by_reference && value.kind != Kind::Invalid {
            self.errors.refuse(argument, "values are passed by value: leave out the `&`");
        }
        (value, mutable)
    }

    /// `T::from_f32(x)`, `f32::from_bits(x)`.
    pub(super) fn associated(&mut self, call: &syn::ExprCall, ty: Type, name: &str) -> Expr {
        let (cpp, wanted) = match (name, &ty) {
            ("from_f32", _) => (intrinsics::FROM_F32, Type::F32),
            ("from_bits", Type::Scalar(Scalar::F32)) => (intrinsics::FROM_BITS, Type::U32),
            ("from_bits", Type::Scalar(Scalar::F16 | Scalar::Bf16)) => {
                (intrinsics::FROM_BITS, Type::Scalar(Scalar::U16))
            }
            _ => {
                return self.refuse(
                    &call.func,
                    "the kernel language has `from_f32` and `from_bits`: write methods as `x.max(y)`",
                );
            }
        };
        let arguments =
            call.args.iter().map(|value| self.expr(value, Some(&wanted), Stands::Beside)).collect();
        let call = Call {
            callee: Callee::Prelude(cpp),
            context: false,
            generics: vec![Generic::Type(ty.clone())],
            arguments,
        };
        Expr::new(Kind::Call(call), Some(ty))
    }

    /// `Fragment::<T>::zero()` and its like.
    pub(super) fn fragment(&mut self, call: &syn::ExprCall, owner: &syn::PathSegment, name: &str) -> Expr {
        let Some(function) = intrinsics::fragment_function(name) else {
            return self.refuse(
                &call.func,
                "`Fragment` has zero, filled, load, load_transposed and multiply_accumulate",
            );
        };
        let mut generics = self.reader().arguments(&owner.arguments).unwrap_or_default();
        if function.deduced {
            // C++ deduces them from the arguments.
            generics.clear();
        } else if generics.is_empty() {
            self.errors.refuse(
                owner,
                format_args!("the elements have no type: write `Fragment::<f32>::{name}(..)`"),
            );
        }
        let mut arguments = Vec::new();
        for (n, argument) in call.args.iter().enumerate() {
            let value = match function.takes.get(n).and_then(|takes| takes.ty()) {
                Some(ty) => self.expr(argument, Some(&ty), Stands::Beside),
                None => self.argument(argument, false).0,
            };
            arguments.push(value);
        }
        let element = match generics.first() {
            _ if function.deduced => Type::F32,
            Some(Generic::Type(ty)) => ty.clone(),
            _ => return Expr::invalid(),
        };
        let ty = Type::Fragment(Box::new(element));
        if function.convergent {
            self.convergence.add_intrinsic(Convergent::Simd);
        }
        let call =
            Call { callee: Callee::Prelude(function.cpp), context: function.convergent, generics, arguments };
        Expr::new(Kind::Call(call), Some(ty))
    }
}
