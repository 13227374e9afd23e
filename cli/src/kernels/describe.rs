//! Descriptions of kernels, as text and as JSON.

use flashtile::kernel::source::{ElementType, GenericKind, Parameter, ParameterKind};
use flashtile::kernel::{Kernel, ParamsField};
use serde_json::{Value, json};

/// The first sentence of a kernel's documentation, or its first paragraph if that has no full stop.
pub(super) fn summary(kernel: &Kernel) -> String {
    let lines = kernel.docs.lines().map(str::trim).skip_while(|line| line.is_empty());
    let paragraph = lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    let end = [". ", ": "].into_iter().filter_map(|end| paragraph.find(end)).min();
    let sentence = end.map_or(paragraph.as_str(), |end| &paragraph[..end]);
    sentence.trim_end_matches('.').to_owned()
}

/// The source file relative to the folder of the crate, and the line.
pub(super) fn place(kernel: &Kernel) -> String {
    format!("{}:{}", kernel.source.file, kernel.source.line)
}

/// The kind of a generic parameter, in Rust.
pub(super) fn bound(kind: GenericKind) -> &'static str {
    match kind {
        GenericKind::Element => "Element",
        GenericKind::Number => "Number",
        GenericKind::Scalar => "Scalar",
        GenericKind::Const(scalar) => scalar.name(),
    }
}

pub(super) fn element(kernel: &Kernel, element: ElementType) -> &'static str {
    match element {
        ElementType::Scalar(scalar) => scalar.name(),
        ElementType::Generic(n) => {
            let derived = kernel.derived.iter().map(|of| &of.parameter);
            kernel.generics.iter().chain(derived).nth(n).map_or("?", |generic| generic.name)
        }
    }
}

/// The type of a parameter, in Rust.
pub(super) fn kind(kernel: &Kernel, kind: ParameterKind) -> String {
    match kind {
        ParameterKind::Buffer { element: of, writable: false } => format!("&Buffer<{}>", element(kernel, of)),
        ParameterKind::Buffer { element: of, .. } => format!("&mut Buffer<{}>", element(kernel, of)),
        ParameterKind::Params { cpp, .. } => format!("&{cpp}"),
        ParameterKind::Scalar(scalar) => scalar.name().to_owned(),
        ParameterKind::Constant(scalar) => format!("#[constant] {}", scalar.name()),
    }
}

/// The parameters in order, each with its index among the buffers or among the constants of a pipeline. Structs have
/// their layout.
pub(super) fn parameters_json(kernel: &Kernel) -> Vec<Value> {
    let (mut buffers, mut constants) = (0, 0);
    let one = |p: &Parameter| {
        let (space, next) = match p.kind {
            ParameterKind::Constant(_) => ("constant", &mut constants),
            _ => ("buffer", &mut buffers),
        };
        let mut of = json!({ "name": p.name, "type": kind(kernel, p.kind), space: *next });
        *next += 1;
        if let ParameterKind::Params { bytes, fields, .. } = p.kind {
            of["bytes"] = json!(bytes);
            of["fields"] = fields.iter().map(field_json).collect();
        }
        of
    };
    kernel.parameters.iter().map(one).collect()
}

/// A field of a struct of parameters.
pub(super) fn field_json(field: &ParamsField) -> Value {
    let ParamsField { name, element, len, offset } = *field;
    json!({ "name": name, "type": element.name(), "len": len, "offset": offset })
}

/// The parameters that are function constants, or the ones that are buffers, each with its index.
pub(super) fn indexed(kernel: &Kernel, constants: bool) -> impl Iterator<Item = (usize, &'static Parameter)> {
    let is_constant = move |p: &&Parameter| matches!(p.kind, ParameterKind::Constant(_)) == constants;
    kernel.parameters.iter().filter(is_constant).enumerate()
}

/// The sentence of a kernel's documentation that says what the threadgroups of a grid are, if there is one.
pub(super) fn grid(kernel: &Kernel) -> Option<String> {
    let lines: Vec<&str> = kernel.docs.lines().map(str::trim).collect();
    let docs = lines.join(" ");
    let starts = ["The grid is", "Groups are", "Threadgroups"];
    let from = starts
        .iter()
        .find_map(|start| docs.find(&format!("{start} ")).or(docs.find(&format!("{start},"))))?;
    let sentence = &docs[from..];
    let end = sentence.find(". ").map_or(sentence.len(), |end| end + 1);
    Some(sentence[..end].trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile::kernels::KERNELS;

    #[test]
    fn grids_are_sentences() {
        let grids = KERNELS.iter().filter_map(|kernel| Some((kernel.name, grid(kernel)?)));
        let grids: std::collections::BTreeMap<_, _> = grids.collect();
        assert_eq!(grids.len(), KERNELS.len() - 1, "all but hadamard: {grids:?}");
        assert_eq!(grids["merge"], "The grid is (queries, heads, batch entries).");
        assert_eq!(grids["copy_rows"], "Threadgroups are (heads, copies).");
        assert!(grids.values().all(|grid| grid.ends_with(['.', ';']) && grid.len() < 200), "{grids:?}");
    }
}
