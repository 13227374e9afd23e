//! Calls of methods.

use super::Lower;
use super::effects::Stands;
use super::intrinsic::given;
use crate::intrinsics::{self, Convergent, Gives, MemoryMethod, Method, Receiver, Takes};
use crate::ir::{Call, Callee, Expr, Generic, Kind, Passed, Scalar, Type};
use crate::node::NodeId;

impl Lower<'_> {
    pub(super) fn method(
        &mut self,
        call: &syn::ExprMethodCall,
        expected: Option<&Type>,
        stands: Stands,
    ) -> Expr {
        let name = call.method.to_string();
        let receiver = self.expr(&call.receiver, None, Stands::Beside);
        if receiver.kind == Kind::Invalid {
            return receiver;
        }
        if self.passed(&call.receiver) == Some(&Passed::Reference) {
            self.annotations.reference_receivers.extend(NodeId::of(&call.attrs));
        }
        if receiver.is_untyped() {
            return self.refuse(&call.receiver, "the literal has no type: add a suffix, `1u32`");
        }
        if let Some(Type::Buffer(_) | Type::Shared(_)) = &receiver.ty {
            let Some(method) = intrinsics::memory_method(&name) else {
                return self.refuse(
                    &call.method,
                    format_args!(
                        "`.{name}`: memory has load, store, load_as and store_as; {}",
                        intrinsics::instead_of(&name)
                    ),
                );
            };
            return self.memory_method(call, method, receiver, stands);
        }
        // The receiver is a field of a struct, where only buffers have these methods.
        let loads = intrinsics::memory_method(&name).filter(|method| !method.writes);
        if let (Some(method), None) = (loads, &receiver.ty) {
            return self.memory_method(call, method, receiver, stands);
        }
        if name == "store" && matches!(receiver.ty, None | Some(Type::Fragment(_))) {
            return self.fragment_store(call, receiver, stands);
        }
        let Some(method) = intrinsics::method(&name) else {
            self.errors.refuse(&call.method, format_args!("`.{name}`: {}", intrinsics::instead_of(&name)));
            for argument in &call.args {
                if !matches!(argument, syn::Expr::Closure(_)) {
                    self.expr(argument, None, Stands::Beside);
                }
            }
            return Expr::invalid();
        };
        if let Some(turbofish) = &call.turbofish {
            self.errors.refuse(turbofish, "methods deduce their types: leave them out");
        }
        if method.receiver == Receiver::FragmentMut {
            self.effect(call, stands);
        }
        self.value_method(call, method, receiver, expected)
    }

    /// A method of a number or a fragment.
    fn value_method(
        &mut self,
        call: &syn::ExprMethodCall,
        method: &Method,
        receiver: Expr,
        expected: Option<&Type>,
    ) -> Expr {
        let mut arguments = Vec::new();
        for (n, argument) in call.args.iter().enumerate() {
            let wanted = match method.takes.get(n) {
                Some(Takes::Same) => receiver.ty.clone(),
                Some(takes) => takes.ty(),
                None => None,
            };
            arguments.push(self.expr(argument, wanted.as_ref(), Stands::Beside));
        }
        let same = self.same(method.takes, &mut arguments, Some(&receiver), expected, call);
        let element = match &receiver.ty {
            Some(Type::Fragment(element)) => Some(&**element),
            _ => None,
        };
        let ty = match (method.gives, &receiver.ty) {
            (Gives::Bits, Some(Type::Scalar(Scalar::F32))) => Some(Type::U32),
            (Gives::Bits, Some(Type::Scalar(_))) => Some(Type::Scalar(Scalar::U16)),
            _ => given(method.gives, same.as_ref(), element),
        };
        arguments.insert(0, receiver);
        let callee = Callee::Prelude(method.cpp);
        Expr::new(Kind::Call(Call { callee, context: false, generics: Vec::new(), arguments }), ty)
    }

    /// `fragment.store(memory, offset, stride)`.
    fn fragment_store(&mut self, call: &syn::ExprMethodCall, fragment: Expr, stands: Stands) -> Expr {
        let mut arguments = vec![fragment];
        for (n, argument) in call.args.iter().enumerate() {
            let value = if n == 0 {
                self.argument(argument, true).0
            } else {
                self.expr(argument, Some(&Type::U32), Stands::Beside)
            };
            arguments.push(value);
        }
        self.effect(call, stands);
        self.convergence.add_intrinsic(Convergent::Simd);
        let callee = Callee::Prelude(intrinsics::FRAGMENT_STORE);
        Expr::new(Kind::Call(Call { callee, context: true, generics: Vec::new(), arguments }), None)
    }

    /// A load from memory, or a store to it. The type of memory that a field holds is not known here.
    fn memory_method(
        &mut self,
        call: &syn::ExprMethodCall,
        method: &MemoryMethod,
        memory: Expr,
        stands: Stands,
    ) -> Expr {
        let element = match &memory.ty {
            Some(Type::Buffer(element) | Type::Shared(element)) => Some((**element).clone()),
            _ => None,
        };
        let mut generics = match &call.turbofish {
            Some(turbofish) => {
                let arguments = syn::PathArguments::AngleBracketed(turbofish.clone());
                self.reader().arguments(&arguments).unwrap_or_default()
            }
            None => Vec::new(),
        };
        if !method.generics.contains(&generics.len()) {
            return self.refuse(
                call,
                format_args!("C++ cannot infer the generic arguments: write `{}`", method.usage),
            );
        }
        let array = |element: &Type, length: Expr| Type::Array(Box::new(element.clone()), Box::new(length));
        let ty = match &generics[..] {
            [Generic::Const(length)] => element.as_ref().map(|element| array(element, length.clone())),
            [Generic::Type(ty), Generic::Const(length)] => Some(array(ty, length.clone())),
            _ => None,
        };
        // Where no generic argument says it, the length is the array's own.
        let stored = ty.clone().or_else(|| element.map(|element| array(&element, Expr::invalid())));
        let mut arguments = vec![memory];
        for (n, argument) in call.args.iter().enumerate() {
            arguments.push(self.expr(argument, stored.as_ref().filter(|_| n == 1), Stands::Beside));
        }
        let ty = if method.writes {
            self.effect(call, stands);
            // C++ takes them from the array.
            generics.clear();
            None
        } else {
            ty
        };
        let callee = Callee::Prelude(method.cpp);
        Expr::new(Kind::Call(Call { callee, context: false, generics, arguments }), ty)
    }
}
