//! Expressions: operators, casts, elements and fields, arrays, `if` with a value.

use super::Lower;
use super::effects::Stands;
use super::literal::{adopt, settled};
use super::stmt::needs_statements;
use crate::ir::{Binary, Expr, Kind, Passed, Scalar, Type};
use crate::names;
use crate::node::NodeId;
use crate::syntax::{operator, strip};

impl Lower<'_> {
    pub(super) fn expr(&mut self, expr: &syn::Expr, expected: Option<&Type>, stands: Stands) -> Expr {
        match expr {
            syn::Expr::Paren(inner) => self.expr(&inner.expr, expected, stands),
            syn::Expr::Group(inner) => self.expr(&inner.expr, expected, stands),
            syn::Expr::Lit(literal) => self.literal(&literal.lit, expected),
            syn::Expr::Path(path) => self.path(path),
            syn::Expr::Unary(unary) => self.unary(unary, expected, stands),
            syn::Expr::Binary(binary) => self.binary(binary, stands),
            syn::Expr::Cast(cast) => self.cast(cast, stands),
            syn::Expr::Index(index) => self.index(index),
            syn::Expr::Field(field) => self.field(field, stands),
            syn::Expr::Call(call) => self.call(call, expected, stands),
            syn::Expr::MethodCall(call) => self.method(call, expected, stands),
            syn::Expr::Array(array) => self.array(array, expected),
            syn::Expr::Repeat(repeat) => self.repeat(repeat, expected),
            syn::Expr::If(conditional) if !needs_statements(expr) => {
                self.choose(conditional, expected, stands)
            }
            syn::Expr::Block(block) if !needs_statements(expr) => match tail(&block.block) {
                Some(inner) => self.expr(inner, expected, stands),
                None => self.refuse(expr, "a block with a value ends in an expression"),
            },
            syn::Expr::Macro(mac) => {
                self.refuse_macro(&mac.mac);
                Expr::invalid()
            }
            other => self.refuse(other, why_refused(other)),
        }
    }

    fn field(&mut self, field: &syn::ExprField, stands: Stands) -> Expr {
        let base = self.expr(&field.base, None, stands);
        match &field.member {
            syn::Member::Named(name) => {
                Expr::new(Kind::Field(Box::new(base), names::field(&name.to_string())), None)
            }
            syn::Member::Unnamed(_) => {
                self.refuse(&field.member, "tuples are not part of the kernel language: name the field")
            }
        }
    }

    /// An operand of an operator, in the type of its neighbour where that is known.
    pub(super) fn operand(&mut self, expr: &syn::Expr, expected: Option<&Type>, stands: Stands) -> Expr {
        let mut value = self.expr(expr, None, stands);
        // `x + 1` stays as written: C++ converts the literal to the type of x. Beside a float rustc accepts only a float.
        if let (Kind::Int { value: digits, .. }, Some(ty)) = (&value.kind, expected)
            && value.ty.is_none()
            && *digits > i32::MAX as u64
        {
            value.ty = Some(ty.clone());
        }
        value
    }

    pub(super) fn operands(&mut self, op: Binary, left: &Expr, right: &Expr, whole: &syn::ExprBinary) {
        if left.is_untyped() && (right.is_untyped() || op.is_shift()) {
            self.errors
                .refuse(whole, "the literals have no type, and C++ would take `int`: add a suffix, `1u32`");
        }
        if op.is_bitwise() && (left.scalar() == Some(Scalar::Bool) || right.scalar() == Some(Scalar::Bool)) {
            self.annotations.bool_operators.extend(NodeId::of_operator(whole));
        }
    }

    fn unary(&mut self, unary: &syn::ExprUnary, expected: Option<&Type>, stands: Stands) -> Expr {
        match unary.op {
            syn::UnOp::Neg(_) => {
                let operand = self.expr(&unary.expr, expected, stands);
                let ty = operand.ty.clone();
                settled(Expr::new(Kind::Neg(Box::new(operand)), ty))
            }
            syn::UnOp::Not(_) => {
                let operand = self.expr(&unary.expr, expected, stands);
                if operand.is_untyped() {
                    self.errors.refuse(&unary.expr, "the literal has no type: add a suffix, `!0u32`");
                }
                let ty = operand.ty.clone();
                Expr::new(Kind::Not(Box::new(operand)), ty)
            }
            syn::UnOp::Deref(_) => {
                let passed = self.passed(&unary.expr);
                if let (syn::Expr::Path(path), Some(Passed::Reference)) = (strip(&unary.expr), passed) {
                    return self.path(path);
                }
                self.refuse(unary, "only a `&mut` parameter can be dereferenced: leave out the `*`")
            }
            _ => self.refuse(unary, "the operator is not part of the kernel language"),
        }
    }

    fn binary(&mut self, binary: &syn::ExprBinary, stands: Stands) -> Expr {
        let Some(op) = operator(&binary.op) else {
            return self.refuse(binary, "an assignment has no value: write it as a statement");
        };
        if matches!(op, Binary::And | Binary::Or) {
            // Both languages evaluate the right side after the left, or not at all.
            let left = self.expr(&binary.left, Some(&Type::BOOL), stands);
            let right = self.expr(&binary.right, Some(&Type::BOOL), stands);
            return Expr::new(Kind::Binary(op, Box::new(left), Box::new(right)), Some(Type::BOOL));
        }
        let beside = |still: bool| if still { stands } else { Stands::Beside };
        let (left_stands, right_stands) =
            (beside(self.is_still(&binary.right)), beside(self.is_still(&binary.left)));
        let mut left = self.operand(&binary.left, None, left_stands);
        let expected = if op.is_shift() { None } else { left.ty.as_ref() };
        let right = self.operand(&binary.right, expected, right_stands);
        if let (Kind::Int { value, .. }, None) = (&left.kind, &left.ty)
            && *value > i32::MAX as u64
            && !op.is_shift()
        {
            left.ty.clone_from(&right.ty);
        }
        self.operands(op, &left, &right, binary);
        let ty = if op.is_comparison() {
            Some(Type::BOOL)
        } else if op.is_shift() {
            left.ty.clone()
        } else {
            left.ty.clone().or_else(|| right.ty.clone())
        };
        Expr::new(Kind::Binary(op, Box::new(left), Box::new(right)), ty)
    }

    fn cast(&mut self, cast: &syn::ExprCast, stands: Stands) -> Expr {
        let value = self.expr(&cast.expr, None, stands);
        let scalar = match &*cast.ty {
            syn::Type::Path(path) if path.qself.is_none() => path.path.get_ident().and_then(|name| {
                let scalar = Scalar::of(&name.to_string())?;
                self.depends.own_scalar(&path.path, scalar);
                Some(scalar)
            }),
            _ => None,
        };
        match scalar {
            Some(Scalar::F16 | Scalar::Bf16) => self.refuse(
                &cast.ty,
                "`as` does not convert to 16-bit floats: write `f16::from_f32(x)` or `bf16::from_f32(x)`",
            ),
            Some(scalar) => Expr::new(Kind::Cast(Box::new(value), scalar), Some(Type::Scalar(scalar))),
            None => {
                // The reader refuses types that the language does not have, such as f64.
                if self.reader().read(&cast.ty).is_some() {
                    self.errors.refuse(
                        &cast.ty,
                        "`as` converts between scalars: write `T::from_f32(x)` for a type parameter",
                    );
                }
                Expr::invalid()
            }
        }
    }

    fn index(&mut self, index: &syn::ExprIndex) -> Expr {
        let base = self.expr(&index.expr, None, Stands::Beside);
        if let syn::Expr::Range(range) = strip(&index.index) {
            return self.refuse(
                range,
                "slices are not part of the kernel language: index one element, or `load::<N>(i)`",
            );
        }
        let position = self.expr(&index.index, None, Stands::Beside);
        let ty = match &base.ty {
            Some(Type::Array(element, _) | Type::Buffer(element) | Type::Shared(element)) => {
                Some((**element).clone())
            }
            _ => None,
        };
        Expr::new(Kind::Index(Box::new(base), Box::new(position)), ty)
    }

    fn array(&mut self, array: &syn::ExprArray, expected: Option<&Type>) -> Expr {
        let mut element = match expected {
            Some(Type::Array(element, _)) => Some((**element).clone()),
            _ => None,
        };
        let mut elements: Vec<Expr> =
            array.elems.iter().map(|value| self.expr(value, element.as_ref(), Stands::Beside)).collect();
        if element.is_none() {
            element = elements.iter().find_map(|value| value.ty.clone());
            if let Some(ty) = &element {
                elements.iter_mut().for_each(|value| adopt(value, ty));
            }
        }
        let first_untyped = elements.first().is_some_and(Expr::is_untyped);
        if elements.is_empty() {
            return self.refuse(array, "C++ has no empty arrays: leave it out");
        }
        if element.is_none() && first_untyped {
            return self.refuse(
                array,
                "the first literal has no type, and C++ would take `int`: add a suffix, `[0u32, ..]`",
            );
        }
        let length = Expr::new(Kind::Int { value: elements.len() as u64, hex: false }, None);
        let ty = element.map(|ty| Type::Array(Box::new(ty), Box::new(length)));
        Expr::new(Kind::Array(elements), ty)
    }

    fn repeat(&mut self, repeat: &syn::ExprRepeat, expected: Option<&Type>) -> Expr {
        let element = match expected {
            Some(Type::Array(element, _)) => Some((**element).clone()),
            _ => None,
        };
        let value = self.expr(&repeat.expr, element.as_ref(), Stands::Beside);
        if element.is_none() && value.is_untyped() {
            return self.refuse(
                &repeat.expr,
                "the literal has no type, and C++ would take `int`: add a suffix, `0u32`",
            );
        }
        let length = self.constant(&repeat.len, Some(Scalar::Usize));
        let ty = element.or_else(|| value.ty.clone());
        let ty = ty.map(|ty| Type::Array(Box::new(ty), Box::new(length.clone())));
        Expr::new(Kind::Repeat(Box::new(value), Box::new(length)), ty)
    }

    fn choose(&mut self, conditional: &syn::ExprIf, expected: Option<&Type>, stands: Stands) -> Expr {
        let condition = self.expr(&conditional.cond, Some(&Type::BOOL), stands);
        let then = tail(&conditional.then_branch);
        let otherwise = conditional.else_branch.as_ref().and_then(|(_, branch)| match &**branch {
            syn::Expr::Block(block) => tail(&block.block),
            nested => Some(nested),
        });
        let (Some(then), Some(otherwise)) = (then, otherwise) else {
            return self.refuse(conditional, "an `if` with a value needs a value in both branches");
        };
        let mut then = self.expr(then, expected, stands);
        let mut otherwise = self.expr(otherwise, expected, stands);
        let ty = then.ty.clone().or_else(|| otherwise.ty.clone());
        if let Some(ty) = &ty {
            adopt(&mut then, ty);
            adopt(&mut otherwise, ty);
        }
        if ty.is_none() && then.is_untyped() != otherwise.is_untyped() {
            self.annotations.beside_literals.extend(NodeId::of(&conditional.attrs));
        }
        settled(Expr::new(Kind::Choose(Box::new(condition), Box::new(then), Box::new(otherwise)), ty))
    }
}

/// The value of a block without statements.
fn tail(block: &syn::Block) -> Option<&syn::Expr> {
    match &block.stmts[..] {
        [syn::Stmt::Expr(value, None)] => Some(value),
        _ => None,
    }
}

/// The reason why an expression is refused, and its replacement.
fn why_refused(expr: &syn::Expr) -> &'static str {
    match expr {
        syn::Expr::If(_) | syn::Expr::Block(_) => {
            "blocks with statements stand alone in C++: bind the value first, `let x: T = ..`, and use `x`"
        }
        syn::Expr::Struct(_) => {
            "struct literals stand alone in C++: bind the struct first, `let s = ..`, and use `s`"
        }
        syn::Expr::Reference(reference) => {
            if matches!(strip(&reference.expr), syn::Expr::Index(_)) {
                "elements cannot be borrowed: pass the memory or the array, and the index"
            } else {
                "references are arguments of functions only: use the value"
            }
        }
        syn::Expr::Match(_) => "`match` is not part of the kernel language: write `if` and `else if`",
        syn::Expr::Let(_) => "patterns are not part of the kernel language: compare with `==`",
        syn::Expr::Closure(_) => "closures do not exist on GPUs: write a #[device] function",
        syn::Expr::Tuple(tuple) if tuple.elems.is_empty() => "the kernel language has no `()`: leave it out",
        syn::Expr::Tuple(_) => {
            "tuples are not part of the kernel language: use a #[device] struct or an array"
        }
        syn::Expr::Range(_) => "ranges are for `for` loops: write the bounds",
        syn::Expr::Try(_) => "GPUs have no `?`: return a flag",
        syn::Expr::Unsafe(_) => "nothing in the kernel language is unsafe: leave out the block",
        syn::Expr::Async(_) | syn::Expr::Await(_) => "GPUs have no `async`: use `barrier()` to wait",
        syn::Expr::Assign(_) => "an assignment has no value: write it as a statement",
        syn::Expr::While(_) | syn::Expr::ForLoop(_) | syn::Expr::Loop(_) => {
            "loops have no value in C++: assign to a variable in the loop"
        }
        syn::Expr::Break(_) | syn::Expr::Continue(_) | syn::Expr::Return(_) => {
            "`break`, `continue` and `return` have no value: write a statement"
        }
        syn::Expr::Const(_) => "a `const` block is a statement: `const { assert!(..) }`",
        _ => "the expression is not part of the kernel language",
    }
}
