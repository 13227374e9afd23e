//! Helpers for syn's tree.

use crate::ir::Binary;

/// The path without generic arguments: of the module beside the function that it names.
pub(crate) fn module_of(path: &syn::Path) -> syn::Path {
    let mut path = path.clone();
    for segment in &mut path.segments {
        segment.arguments = syn::PathArguments::None;
    }
    path
}

/// The call of `shared(..)`.
pub(crate) fn shared_call(expr: &syn::Expr) -> Option<&syn::ExprCall> {
    match strip(expr) {
        syn::Expr::Call(call) => match &*call.func {
            syn::Expr::Path(path) if path.qself.is_none() => {
                let segment = path.path.segments.first()?;
                (path.path.segments.len() == 1 && segment.ident == "shared").then_some(call)
            }
            _ => None,
        },
        _ => None,
    }
}

/// Attributes that only speak to rustc's lints and to rustfmt.
pub(crate) fn is_lint(attribute: &syn::Attribute) -> bool {
    let path = attribute.path();
    ["allow", "expect", "warn", "deny", "doc"].iter().any(|name| path.is_ident(name))
        || path.segments.first().is_some_and(|segment| segment.ident == "rustfmt")
}

/// The expression without parentheses and invisible groups.
pub(crate) fn strip(expr: &syn::Expr) -> &syn::Expr {
    match expr {
        syn::Expr::Paren(inner) => strip(&inner.expr),
        syn::Expr::Group(inner) => strip(&inner.expr),
        other => other,
    }
}

/// `#[unroll]`.
pub(crate) fn is_unroll(attribute: &syn::Attribute) -> bool {
    attribute.path().is_ident("unroll") && matches!(attribute.meta, syn::Meta::Path(_))
}

/// The operator of an expression with a value.
pub(crate) fn operator(op: &syn::BinOp) -> Option<Binary> {
    Some(match op {
        syn::BinOp::Add(_) => Binary::Add,
        syn::BinOp::Sub(_) => Binary::Sub,
        syn::BinOp::Mul(_) => Binary::Mul,
        syn::BinOp::Div(_) => Binary::Div,
        syn::BinOp::Rem(_) => Binary::Rem,
        syn::BinOp::Shl(_) => Binary::Shl,
        syn::BinOp::Shr(_) => Binary::Shr,
        syn::BinOp::BitAnd(_) => Binary::BitAnd,
        syn::BinOp::BitXor(_) => Binary::BitXor,
        syn::BinOp::BitOr(_) => Binary::BitOr,
        syn::BinOp::Eq(_) => Binary::Eq,
        syn::BinOp::Ne(_) => Binary::Ne,
        syn::BinOp::Lt(_) => Binary::Lt,
        syn::BinOp::Le(_) => Binary::Le,
        syn::BinOp::Gt(_) => Binary::Gt,
        syn::BinOp::Ge(_) => Binary::Ge,
        syn::BinOp::And(_) => Binary::And,
        syn::BinOp::Or(_) => Binary::Or,
        _ => return None,
    })
}

/// The operator of an assignment: `+` of `+=`.
pub(crate) fn compound(op: &syn::BinOp) -> Option<Binary> {
    Some(match op {
        syn::BinOp::AddAssign(_) => Binary::Add,
        syn::BinOp::SubAssign(_) => Binary::Sub,
        syn::BinOp::MulAssign(_) => Binary::Mul,
        syn::BinOp::DivAssign(_) => Binary::Div,
        syn::BinOp::RemAssign(_) => Binary::Rem,
        syn::BinOp::ShlAssign(_) => Binary::Shl,
        syn::BinOp::ShrAssign(_) => Binary::Shr,
        syn::BinOp::BitAndAssign(_) => Binary::BitAnd,
        syn::BinOp::BitXorAssign(_) => Binary::BitXor,
        syn::BinOp::BitOrAssign(_) => Binary::BitOr,
        _ => return None,
    })
}

/// The generic arguments of a type that C++ has too.
pub(crate) fn without_lifetimes(arguments: &syn::PathArguments) -> syn::PathArguments {
    let mut printed = arguments.clone();
    if let syn::PathArguments::AngleBracketed(arguments) = &mut printed {
        arguments.args = std::mem::take(&mut arguments.args)
            .into_iter()
            .filter(|argument| !matches!(argument, syn::GenericArgument::Lifetime(_)))
            .collect();
        if arguments.args.is_empty() {
            printed = syn::PathArguments::None;
        }
    }
    printed
}
