//! The arguments of `#[kernel(..)]`.

use proc_macro2::Span;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Expr, Ident, LitStr, Token};

/// The contract of a kernel.
#[derive(Default)]
pub(crate) struct Arguments {
    pub(crate) threads: Option<Threads>,
    /// Threadgroups that a core is to hold at a time.
    pub(crate) resident: Option<Expr>,
    pub(crate) derive: Vec<Derived>,
    pub(crate) requires: Vec<Requirement>,
    pub(crate) exact: bool,
    pub(crate) bench: Option<Bench>,
}

/// `threads = N`, or `threads <= N`.
pub(crate) struct Threads {
    pub(crate) most: Expr,
    pub(crate) exactly: bool,
}

/// `NAME: TYPE = VALUE` or `NAME: BOUND = VALUE`: a generic parameter that follows from the ones before it.
pub(crate) struct Derived {
    pub(crate) name: Ident,
    /// The type of a number, or the bound of a type.
    pub(crate) kind: Ident,
    pub(crate) value: Expr,
}

impl Derived {
    /// As a parameter of the function.
    pub(crate) fn parameter(&self) -> syn::GenericParam {
        let Derived { name, kind, .. } = self;
        match kind.to_string().as_str() {
            "Element" | "Number" | "Scalar" => syn::parse_quote!(#name: #kind),
            _ => syn::parse_quote!(const #name: #kind),
        }
    }
}

impl Parse for Derived {
    fn parse(input: ParseStream<'_>) -> syn::Result<Derived> {
        let name: Ident = input.parse()?;
        if !input.peek(Token![:]) {
            return Err(syn::Error::new(
                name.span(),
                format!(
                    "say what it is: `{name}: usize = ..` for a number, `{name}: Element = ..` for a type"
                ),
            ));
        }
        input.parse::<Token![:]>()?;
        Ok(Derived { name, kind: input.parse()?, value: value(input)? })
    }
}

/// A condition and its meaning.
pub(crate) struct Requirement {
    pub(crate) condition: Expr,
    pub(crate) message: LitStr,
}

/// The shapes to measure.
pub(crate) struct Bench {
    /// The span of the name `bench`.
    pub(crate) span: Span,
    /// Names and sizes of each shape.
    pub(crate) shapes: Vec<Vec<(Ident, Expr)>>,
    pub(crate) bytes: Option<Expr>,
    pub(crate) flops: Option<Expr>,
    pub(crate) tolerance: Option<Expr>,
}

impl Parse for Arguments {
    fn parse(input: ParseStream<'_>) -> syn::Result<Arguments> {
        let mut all = Arguments::default();
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            match name.to_string().as_str() {
                "threads" => {
                    let exactly = !input.peek(Token![<=]);
                    if exactly {
                        input.parse::<Token![=]>()?;
                    } else {
                        input.parse::<Token![<=]>()?;
                    }
                    let threads = Threads { most: input.parse()?, exactly };
                    if all.threads.replace(threads).is_some() {
                        return Err(syn::Error::new(name.span(), "`threads` is given once"));
                    }
                }
                "resident" => {
                    input.parse::<Token![=]>()?;
                    all.resident = Some(input.parse()?);
                }
                "derive" => {
                    let content;
                    syn::parenthesized!(content in input);
                    all.derive.extend(Punctuated::<Derived, Token![,]>::parse_terminated(&content)?);
                }
                "requires" => {
                    let content;
                    syn::parenthesized!(content in input);
                    requirements(&content, &mut all.requires)?;
                }
                "exact" => all.exact = true,
                "bench" => {
                    let content;
                    syn::parenthesized!(content in input);
                    all.bench = Some(Bench::read(name.span(), &content)?);
                }
                _ => {
                    return Err(syn::Error::new(
                        name.span(),
                        "a kernel's contract has `threads`, `resident`, `derive(..)`, `requires(..)`, `exact` and `bench(..)`",
                    ));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(all)
    }
}

impl Bench {
    fn read(span: Span, input: ParseStream<'_>) -> syn::Result<Bench> {
        let mut bench = Bench { span, shapes: Vec::new(), bytes: None, flops: None, tolerance: None };
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            match name.to_string().as_str() {
                "shape" => {
                    let content;
                    syn::parenthesized!(content in input);
                    bench.shapes.extend(shapes(&content)?);
                }
                "bytes" => bench.bytes = Some(value(input)?),
                "flops" => bench.flops = Some(value(input)?),
                "tolerance" => bench.tolerance = Some(value(input)?),
                _ => {
                    return Err(syn::Error::new(
                        name.span(),
                        "`bench` has `shape(name = [..], ..)`, `bytes`, `flops` and `tolerance`",
                    ));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(bench)
    }
}

fn requirements(input: ParseStream<'_>, all: &mut Vec<Requirement>) -> syn::Result<()> {
    while !input.is_empty() {
        let condition: Expr = input.parse()?;
        if input.is_empty() {
            return Err(syn::Error::new_spanned(
                condition,
                "a condition needs a message: write `requires(condition, \"message\")`",
            ));
        }
        input.parse::<Token![,]>()?;
        all.push(Requirement { condition, message: input.parse()? });
        if !input.is_empty() {
            input.parse::<Token![,]>()?;
        }
    }
    Ok(())
}

fn value(input: ParseStream<'_>) -> syn::Result<Expr> {
    input.parse::<Token![=]>()?;
    input.parse()
}

/// `n = [1, 2], m = 3`: the shapes `n = 1, m = 3` and `n = 2, m = 3`.
fn shapes(input: ParseStream<'_>) -> syn::Result<Vec<Vec<(Ident, Expr)>>> {
    let sizes = Punctuated::<Size, Token![,]>::parse_terminated(input)?;
    let count = sizes.iter().filter_map(|size| size.list()).map(|list| list.elems.len()).max().unwrap_or(1);
    let mut shapes = vec![Vec::new(); count];
    for size in &sizes {
        match size.list() {
            Some(list) if list.elems.len() != count => {
                return Err(syn::Error::new_spanned(
                    list,
                    format!("other sizes of this shape have {count} values"),
                ));
            }
            Some(list) => {
                for (shape, value) in shapes.iter_mut().zip(&list.elems) {
                    shape.push((size.name.clone(), value.clone()));
                }
            }
            None => shapes.iter_mut().for_each(|shape| shape.push((size.name.clone(), size.value.clone()))),
        }
    }
    Ok(shapes)
}

struct Size {
    name: Ident,
    value: Expr,
}

impl Size {
    fn list(&self) -> Option<&syn::ExprArray> {
        match &self.value {
            Expr::Array(list) => Some(list),
            _ => None,
        }
    }
}

impl Parse for Size {
    fn parse(input: ParseStream<'_>) -> syn::Result<Size> {
        let name = input.parse()?;
        Ok(Size { name, value: value(input)? })
    }
}
