//! Small questions about syn's tree.

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
