//! `manifest.json` of exported kernels: all that a launch needs, for programs in any language.

use super::describe::{bound, element, field_json, grid, indexed, parameters_json, summary};
use super::print::SourceTarget;
use flashtile::kernel::source::{Cpp, ItemSource, Parameter, ParameterKind, Threads, dependencies};
use flashtile::kernel::{Instance, Kernel, ParamsField, ScalarType};
use flashtile::kernels::KERNELS;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Name of the file that describes the others.
pub(super) const MANIFEST: &str = "manifest.json";

/// The version of the manifest: it grows when a field changes its meaning or goes away.
const FORMAT: u32 = 1;

/// The manifest of some instances: a line for each struct, kernel and instance.
pub(super) fn manifest(instances: &[Instance]) -> String {
    let head = json!({
        "format": FORMAT,
        "flashtile": env!("CARGO_PKG_VERSION"),
        "target": "metal",
        "language": "Metal Shading Language",
        "language_version": "3.1",
        "math_mode": "safe",
    });
    let kernels = kernels(instances);
    let lists: [(&str, Vec<Value>); 3] = [
        ("structs", structs(&kernels)),
        ("kernels", kernels.into_iter().map(kernel_json).collect()),
        ("instances", instances.iter().map(instance_json).collect()),
    ];
    let fields = head.as_object().into_iter().flatten();
    let mut lines: Vec<String> = fields.map(|(name, value)| format!("  \"{name}\": {value}")).collect();
    for (name, rows) in lists {
        let rows: Vec<String> = rows.iter().map(|row| format!("\n    {row}")).collect();
        lines.push(format!("  \"{name}\": [{}\n  ]", rows.join(",")));
    }
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

/// The file of an instance.
pub(super) fn file(instance: &Instance) -> String {
    format!("{}.{}", instance.entry(), SourceTarget::Msl.extension())
}

/// The kernels of some instances, in the order of the list.
fn kernels(instances: &[Instance]) -> Vec<&'static Kernel> {
    let has = |kernel: &&Kernel| instances.iter().any(|instance| instance.kernel().name == kernel.name);
    KERNELS.iter().copied().filter(has).collect()
}

/// The structs of the parameters of some kernels, each once, in the order of their names.
fn structs(kernels: &[&Kernel]) -> Vec<Value> {
    let mut structs = BTreeMap::new();
    for parameter in kernels.iter().flat_map(|kernel| kernel.parameters) {
        let ParameterKind::Params { cpp, bytes, fields } = parameter.kind else { continue };
        let field = |field: &ParamsField| {
            let mut json = field_json(field);
            json["bytes"] = json!(field.len * field.element.bytes());
            json
        };
        let alignment = fields.iter().map(|field| field.element.bytes()).max().unwrap_or(1);
        let fields: Vec<Value> = fields.iter().map(field).collect();
        structs.insert(cpp, json!({ "name": cpp, "bytes": bytes, "alignment": alignment, "fields": fields }));
    }
    structs.into_values().collect()
}

fn kernel_json(kernel: &'static Kernel) -> Value {
    let generics = kernel.generics.iter().map(|g| json!({ "name": g.name, "type": bound(g.kind) }));
    let derived = kernel.derived.iter().map(|of| {
        let parameter = &of.parameter;
        json!({ "name": parameter.name, "type": bound(parameter.kind), "derived": of.expression })
    });
    let requires =
        kernel.requirements.iter().map(|of| json!({ "message": of.message, "condition": of.condition }));
    json!({
        "kernel": kernel.name,
        "does": summary(kernel),
        "docs": kernel.docs.trim(),
        "defined_in": kernel.source.file,
        "exact": kernel.exact,
        "grid": grid(kernel),
        "generics": generics.chain(derived).collect::<Vec<_>>(),
        "parameters": parameters_json(kernel),
        "requires": requires.collect::<Vec<_>>(),
        "constants": constants(kernel),
    })
}

/// Constants in the kernel's source that its conditions name. A reader of the manifest does not have the Rust source.
fn constants(kernel: &'static Kernel) -> Map<String, Value> {
    let words = |text: &'static str| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let named = |name| kernel.requirements.iter().any(|of| words(of.condition).any(|word| word == name));
    let number = |item: &ItemSource| match item.cpp {
        Cpp::Table { len: None, literals, .. } if named(item.name) => Some((
            item.name.to_owned(),
            json!(literals().concat().trim_end_matches('u').parse::<u32>().ok()?),
        )),
        _ => None,
    };
    dependencies(&kernel.source).into_iter().filter_map(number).collect()
}

fn instance_json(instance: &Instance) -> Value {
    let kernel = instance.kernel();
    let names = kernel.generics.iter().chain(kernel.derived.iter().map(|of| &of.parameter));
    let generics = names.zip(instance.all_generics());
    let generics: Map<_, _> =
        generics.map(|(parameter, value)| (parameter.name.to_owned(), generic_json(value))).collect();
    let (threads, is_exact) = match instance.threads() {
        Threads::Exactly(n) => (n, true),
        Threads::UpTo(n) => (n, false),
    };
    let constant = |(index, parameter): (usize, &Parameter)| json!({ "index": index, "name": parameter.name, "type": type_of(instance, parameter) });
    json!({
        "name": instance.entry(),
        "kernel": kernel.name,
        "entry": instance.entry(),
        "source": file(instance),
        "generics": generics,
        "threads": threads,
        // If not exact, a threadgroup has any multiple of 32 threads up to this number.
        "threads_exact": is_exact,
        "simd_groups": threads.div_ceil(32),
        "threadgroup_bytes": instance.shared_bytes(),
        "bindings": indexed(kernel, false).map(|of| binding_json(instance, of)).collect::<Vec<_>>(),
        "function_constants": indexed(kernel, true).map(constant).collect::<Vec<_>>(),
    })
}

fn generic_json(generic: &flashtile::kernel::Generic) -> Value {
    use flashtile::kernel::Generic;
    match *generic {
        Generic::Type(scalar) => json!(scalar.name()),
        Generic::Usize(x) => json!(x),
        Generic::U32(x) => json!(x),
        Generic::I32(x) => json!(x),
        Generic::Bool(x) => json!(x),
    }
}

/// A buffer of an instance: memory of the device, or bytes that are copied with the launch.
fn binding_json(instance: &Instance, (index, parameter): (usize, &Parameter)) -> Value {
    let of = type_of(instance, parameter);
    let (kind, access, bytes) = match parameter.kind {
        ParameterKind::Buffer { element, writable } => {
            let bytes = element.of(instance.all_generics()).map(ScalarType::bytes);
            ("buffer", if writable { "read_write" } else { "read" }, bytes)
        }
        ParameterKind::Params { bytes, .. } => ("struct", "read", Some(bytes)),
        ParameterKind::Scalar(scalar) | ParameterKind::Constant(scalar) => {
            ("scalar", "read", Some(scalar.bytes()))
        }
    };
    json!({ "index": index, "name": parameter.name, "kind": kind, "type": of, "bytes": bytes, "access": access })
}

/// The type of a number or of the elements of a buffer, or the name of a struct.
fn type_of(instance: &Instance, parameter: &Parameter) -> &'static str {
    match parameter.kind {
        ParameterKind::Buffer { element: of, .. } => {
            let scalar = of.of(instance.all_generics());
            scalar.map_or_else(|| element(instance.kernel(), of), ScalarType::name)
        }
        ParameterKind::Params { cpp, .. } => cpp,
        ParameterKind::Scalar(scalar) | ParameterKind::Constant(scalar) => scalar.name(),
    }
}
