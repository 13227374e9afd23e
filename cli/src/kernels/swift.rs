//! `FlashtileKernels.swift` of exported kernels: structures of parameters, pipelines and launches, of the same data as the manifest.

use super::condition::{self, camel, generic};
use super::describe::{docs, element, grid, indexed};
use super::manifest::{Struct, kernels, structs};
use flashtile::kernel::source::{ElementType, GenericKind, Parameter, ParameterKind, Requirement, Threads};
use flashtile::kernel::{Generic, Instance, Kernel, ParamsField, ScalarType};
use std::fmt::Write as _;

/// What does not depend on the kernels.
const SUPPORT: &str = include_str!("support.swift");

/// The first lines of an extension: an extension is available where the type is.
const EXTENSION: &str =
    "\n@available(macOS 14.0, iOS 17.0, tvOS 17.0, visionOS 1.0, *)\nextension Flashtile {\n";

/// Writing to a `String` does not fail.
macro_rules! put {
    ($out:expr, $($arguments:tt)+) => {{
        let _ = writeln!($out, $($arguments)+);
    }};
}

/// The file for some instances.
pub(super) fn swift(instances: &[Instance]) -> String {
    let mut out = format!(
        "// Written by flashtile {} (flashtile kernels export): do not edit.\n\nimport Foundation\nimport Metal\n",
        env!("CARGO_PKG_VERSION")
    );
    out.push_str(SUPPORT);
    let kernels = kernels(instances);
    let structs = structs(&kernels);
    structs.iter().for_each(|of| structure(&mut out, of));
    layouts(&mut out, &structs);
    for kernel in kernels {
        let of = instances.iter().filter(|instance| instance.kernel().name == kernel.name);
        self::kernel(&mut out, kernel, &of.collect::<Vec<_>>());
    }
    out
}

/// Documentation, indented.
fn comment(out: &mut String, indent: &str, text: &str) {
    for line in text.lines() {
        put!(out, "{}", format!("{indent}/// {line}").trim_end());
    }
}

/// A number on the host. Halves are their bits: not every processor that Swift compiles for has the types.
const fn number(scalar: ScalarType) -> &'static str {
    match scalar {
        ScalarType::Bool => "Bool",
        ScalarType::U8 => "UInt8",
        ScalarType::I8 => "Int8",
        ScalarType::U16 | ScalarType::F16 | ScalarType::Bf16 => "UInt16",
        ScalarType::I16 => "Int16",
        ScalarType::U32 => "UInt32",
        ScalarType::I32 => "Int32",
        ScalarType::U64 | ScalarType::Usize => "UInt64",
        ScalarType::I64 => "Int64",
        ScalarType::F32 => "Float",
    }
}

/// The case of `MTLDataType`.
const fn data_type(scalar: ScalarType) -> &'static str {
    match scalar {
        ScalarType::Bool => "bool",
        ScalarType::U8 => "uchar",
        ScalarType::I8 => "char",
        ScalarType::U16 => "ushort",
        ScalarType::I16 => "short",
        ScalarType::U32 => "uint",
        ScalarType::I32 => "int",
        ScalarType::U64 | ScalarType::Usize => "ulong",
        ScalarType::I64 => "long",
        ScalarType::F32 => "float",
        ScalarType::F16 => "half",
        ScalarType::Bf16 => "bfloat",
    }
}

/// Zero on the host.
const fn zero(scalar: ScalarType) -> &'static str {
    match scalar {
        ScalarType::Bool => "false",
        _ => "0",
    }
}

/// The type of a field, and its zero: arrays are tuples, which lie as arrays do.
fn field_type(field: &ParamsField) -> (String, String) {
    let (one, zero) = (number(field.element), zero(field.element));
    if field.len == 1 {
        return (one.to_owned(), zero.to_owned());
    }
    let tuple = |of: &str| format!("({})", vec![of; field.len].join(", "));
    (tuple(one), tuple(zero))
}

/// A stored property: its documentation, name, type and default.
struct Property {
    docs: String,
    name: String,
    of: String,
    default: Option<String>,
}

/// Stored properties and the initialiser that sets them.
fn properties(out: &mut String, indent: &str, properties: &[Property]) {
    for Property { docs, name, of, .. } in properties {
        comment(out, indent, docs);
        put!(out, "{indent}public var {name}: {of}");
    }
    put!(out, "\n{indent}public init(");
    for (n, Property { name, of, default, .. }) in properties.iter().enumerate() {
        let default = default.as_ref().map_or_else(String::new, |default| format!(" = {default}"));
        let comma = if n + 1 < properties.len() { "," } else { "" };
        put!(out, "{indent}    {name}: {of}{default}{comma}");
    }
    put!(out, "{indent}) {{");
    for Property { name, .. } in properties {
        put!(out, "{indent}    self.{} = {name}", name.trim_matches('`'));
    }
    put!(out, "{indent}}}");
}

/// A structure of parameters.
fn structure(out: &mut String, of: &Struct) {
    out.push_str(EXTENSION);
    let (bytes, alignment) = (of.bytes, of.alignment());
    put!(
        out,
        "    /// Parameters of kernels: {bytes} bytes, aligned to {alignment}, as Metal lays them out."
    );
    put!(out, "    public struct {}: Sendable {{", of.name);
    let field = |field: &ParamsField| {
        let (of, zero) = field_type(field);
        let docs = format!("`{}` of the kernel, at byte {}.", field.name, field.offset);
        Property { docs, name: camel(field.name), of, default: Some(zero) }
    };
    properties(out, "        ", &of.fields.iter().map(field).collect::<Vec<_>>());
    put!(out, "    }}\n}}");
}

/// The check of all layouts.
fn layouts(out: &mut String, structs: &[Struct]) {
    out.push_str(EXTENSION);
    put!(
        out,
        "    /// Throws where this compiler lays out a structure of parameters differently than Metal."
    );
    put!(out, "    fileprivate static func checkLayouts() throws {{");
    for Struct { name, bytes, fields } in structs {
        let alignment = Struct { name, bytes: *bytes, fields }.alignment();
        put!(out, "        try checkLayout(");
        put!(out, "            of: {name}.self, bytes: {bytes}, alignment: {alignment},");
        put!(out, "            offsets: [");
        for field in *fields {
            let name_of = camel(field.name);
            put!(out, "                (MemoryLayout<{name}>.offset(of: \\.{name_of}), {}),", field.offset);
        }
        put!(out, "            ])");
    }
    put!(out, "    }}\n}}");
}

/// The name of a kernel's structure: `copy_rows` is `CopyRowsKernel`.
fn kernel_type(kernel: &Kernel) -> String {
    let name = camel(&format!("_{}", kernel.name));
    format!("{name}Kernel")
}

/// The structure of a kernel.
fn kernel(out: &mut String, kernel: &'static Kernel, instances: &[&Instance]) {
    out.push_str(EXTENSION);
    comment(out, "    ", &docs(kernel));
    put!(out, "    public struct {} {{", kernel_type(kernel));
    enumeration(out, instances);
    traits(out, kernel);
    constants(out, kernel);
    arguments(out, kernel);
    pipeline(out, kernel);
    encode(out, kernel);
    put!(out, "    }}\n}}");
}

/// The instances, and what tells them apart.
fn enumeration(out: &mut String, instances: &[&Instance]) {
    put!(out, "        /// The kernel with its generics fixed, by the name of its function.");
    put!(out, "        public enum Instance: String, CaseIterable, Sendable {{");
    for instance in instances {
        put!(out, "            case {}", instance.entry());
    }
    put!(out, "\n            /// Its generics, and what a threadgroup of it takes.");
    put!(out, "            public var traits: Traits {{");
    put!(out, "                switch self {{");
    for instance in instances {
        let kernel = instance.kernel();
        let names = kernel.generics.iter().chain(kernel.derived.iter().map(|of| &of.parameter));
        let generics = names.zip(instance.all_generics()).map(|(parameter, value)| {
            let value = match value {
                Generic::Type(scalar) => format!(".{}", scalar.name()),
                Generic::Usize(_) | Generic::U32(_) | Generic::I32(_) | Generic::Bool(_) => value.to_string(),
            };
            format!("{}: {value}, ", generic(parameter.name))
        });
        let exact = matches!(instance.threads(), Threads::Exactly(_));
        put!(out, "                case .{}:", instance.entry());
        put!(
            out,
            "                    return Traits({}maxThreads: {}, hasExactThreads: {exact}, threadgroupBytes: {})",
            generics.collect::<String>(),
            instance.threads().most(),
            instance.shared_bytes()
        );
    }
    put!(out, "                }}\n            }}\n        }}\n");
}

fn traits(out: &mut String, kernel: &Kernel) {
    put!(out, "        /// The generics of an instance, and what a threadgroup of it takes.");
    put!(out, "        public struct Traits: Sendable {{");
    for parameter in kernel.generics.iter().chain(kernel.derived.iter().map(|of| &of.parameter)) {
        let of = match parameter.kind {
            GenericKind::Element | GenericKind::Number | GenericKind::Scalar => "Element",
            GenericKind::Const(ScalarType::Bool) => "Bool",
            GenericKind::Const(_) => "Int",
        };
        put!(out, "            /// `{}`.", parameter.name);
        put!(out, "            public let {}: {of}", generic(parameter.name));
    }
    put!(out, "            /// The threads of a threadgroup, at most.");
    put!(out, "            public let maxThreads: Int");
    put!(
        out,
        "            /// Whether a threadgroup has exactly these; otherwise any multiple of 32 up to them."
    );
    put!(out, "            public let hasExactThreads: Bool");
    put!(out, "            /// Bytes of threadgroup memory.");
    put!(out, "            public let threadgroupBytes: Int");
    put!(out, "        }}\n");
}

/// The function constants.
fn constants(out: &mut String, kernel: &Kernel) {
    let all: Vec<(usize, &Parameter)> = indexed(kernel, true).collect();
    if all.is_empty() {
        return;
    }
    put!(out, "        /// What a pipeline fixes: its function constants.");
    put!(out, "        public struct Constants: Sendable {{");
    let property = |(index, parameter): &(usize, &Parameter)| {
        let docs = format!("`{}`: `[[function_constant({index})]]`.", parameter.name);
        let of = scalar_of(parameter).map_or("Bool", number).to_owned();
        Property { docs, name: camel(parameter.name), of, default: None }
    };
    properties(out, "            ", &all.iter().map(property).collect::<Vec<_>>());
    put!(out, "        }}\n");
}

/// The type of a number that a launch or a pipeline is given.
const fn scalar_of(parameter: &Parameter) -> Option<ScalarType> {
    match parameter.kind {
        ParameterKind::Scalar(scalar) | ParameterKind::Constant(scalar) => Some(scalar),
        ParameterKind::Buffer { .. } | ParameterKind::Params { .. } => None,
    }
}

/// What a launch is given.
fn arguments(out: &mut String, kernel: &Kernel) {
    put!(
        out,
        "        /// What a launch is given. A buffer that the pipeline's constants leave out is bound, and not read: any buffer will do."
    );
    put!(out, "        public struct Arguments {{");
    let property = |(index, parameter): (usize, &Parameter)| {
        let name = parameter.name;
        let (what, of) = match parameter.kind {
            ParameterKind::Buffer { element: scalar, writable } => {
                let verb = if writable { "read and written" } else { "read" };
                let of = element(kernel, scalar);
                (format!("elements of `{of}`, {verb}"), "Buffer".to_owned())
            }
            ParameterKind::Params { cpp, .. } => ("copied".to_owned(), cpp.to_owned()),
            ParameterKind::Scalar(scalar) | ParameterKind::Constant(scalar) => {
                ("copied".to_owned(), number(scalar).to_owned())
            }
        };
        Property {
            docs: format!("`{name}`: `[[buffer({index})]]`, {what}."),
            name: camel(name),
            of,
            default: None,
        }
    };
    properties(out, "            ", &indexed(kernel, false).map(property).collect::<Vec<_>>());
    put!(out, "        }}\n");
}

/// The stored pipeline and its initialiser.
fn pipeline(out: &mut String, kernel: &Kernel) {
    let constants: Vec<(usize, &Parameter)> = indexed(kernel, true).collect();
    let parameter = if constants.is_empty() { "" } else { "constants: Constants, " };
    put!(out, "        public let instance: Instance");
    if !constants.is_empty() {
        put!(out, "        public let constants: Constants");
    }
    put!(out, "        public let state: any MTLComputePipelineState");
    put!(out, "        /// Threads of a threadgroup.");
    put!(out, "        public let threads: Int\n");
    put!(
        out,
        "        /// Compiles an instance, for threadgroups of `threads` threads where the kernel leaves a choice."
    );
    put!(out, "        ///");
    put!(
        out,
        "        /// Throws `KernelError` where the device does not run it, and errors of the file system and of Metal."
    );
    put!(out, "        public init(");
    put!(out, "            _ instance: Instance, {parameter}library: Library, threads: Int? = nil");
    put!(out, "        ) throws {{");
    put!(out, "            let traits = instance.traits");
    put!(out, "            self.instance = instance");
    if !constants.is_empty() {
        put!(out, "            self.constants = constants");
    }
    put!(out, "            self.threads = try Flashtile.threads(");
    put!(
        out,
        "                threads, of: instance.rawValue, atMost: traits.maxThreads, exactly: traits.hasExactThreads)"
    );
    put!(out, "            let values = MTLFunctionConstantValues()");
    for (index, parameter) in &constants {
        let (name, scalar) = (camel(parameter.name), scalar_of(parameter).unwrap_or(ScalarType::Bool));
        put!(out, "            withUnsafeBytes(of: constants.{name}) {{");
        put!(
            out,
            "                values.setConstantValue($0.baseAddress!, type: .{}, index: {index})",
            data_type(scalar)
        );
        put!(out, "            }}");
    }
    put!(out, "            state = try library.pipeline(");
    put!(out, "                instance.rawValue, constants: values, threads: self.threads,");
    put!(out, "                threadgroupBytes: traits.threadgroupBytes)");
    put!(out, "        }}\n");
}

/// The function that encodes a launch, after its conditions.
fn encode(out: &mut String, kernel: &'static Kernel) {
    let (checked, others): (Vec<&Requirement>, Vec<&Requirement>) =
        kernel.requirements.iter().partition(|of| condition::swift(kernel, of.condition).is_some());
    put!(out, "        /// Encodes a launch of `groups` threadgroups.");
    if let Some(grid) = grid(kernel) {
        comment(out, "        ", &format!("\n{grid}"));
    }
    put!(out, "        ///");
    put!(
        out,
        "        /// Throws `KernelError`, before anything is encoded, where a condition of the kernel does not hold."
    );
    if !others.is_empty() {
        put!(
            out,
            "        /// These conditions are not checked here; where one does not hold, the kernel may read or write outside of its buffers:"
        );
        put!(out, "        ///");
        for of in others {
            put!(out, "        /// - {}: `{}`", of.message, of.condition.trim());
        }
    }
    put!(out, "        public func encode(");
    put!(
        out,
        "            _ arguments: Arguments, groups: MTLSize, into encoder: any MTLComputeCommandEncoder"
    );
    put!(out, "        ) throws {{");
    conditions(out, kernel, &checked);
    put!(out, "            encoder.setComputePipelineState(state)");
    for (index, parameter) in indexed(kernel, false) {
        let name = camel(parameter.name);
        if matches!(parameter.kind, ParameterKind::Buffer { .. }) {
            put!(
                out,
                "            encoder.setBuffer(arguments.{name}.buffer, offset: arguments.{name}.offset, index: {index})"
            );
        } else {
            put!(out, "            withUnsafeBytes(of: arguments.{name}) {{");
            put!(out, "                encoder.setBytes($0.baseAddress!, length: $0.count, index: {index})");
            put!(out, "            }}");
        }
    }
    put!(out, "            encoder.dispatchThreadgroups(");
    put!(out, "                groups, threadsPerThreadgroup: MTLSize(width: threads, height: 1, depth: 1))");
    put!(out, "        }}");
}

/// The checks of a launch: the grid, the offsets of buffers, and conditions.
fn conditions(out: &mut String, kernel: &'static Kernel, checked: &[&Requirement]) {
    let quoted = |text: &str| format!("\"{}\"", text.trim().replace('\\', "\\\\").replace('"', "\\\""));
    let translated: Vec<String> =
        checked.iter().filter_map(|of| condition::swift(kernel, of.condition)).collect();
    put!(out, "            try Flashtile.requireGrid(groups, {})", quoted(kernel.name));
    let has_generic = |text: &str| text.contains("traits.");
    let mut counts = String::new();
    for (_, parameter) in indexed(kernel, false) {
        let ParameterKind::Buffer { element: scalar, .. } = parameter.kind else { continue };
        let of = element(kernel, scalar);
        let of = match scalar {
            ElementType::Scalar(scalar) => format!(".{}", scalar.name()),
            ElementType::Generic(_) => format!("traits.{}", generic(of)),
        };
        let name = camel(parameter.name);
        let count = format!("{name}Count");
        let mut words = translated.iter().flat_map(|of| of.split(|c: char| !c.is_ascii_alphanumeric()));
        let is_used = words.any(|word| word == count);
        let binding = if is_used { format!("let {count}") } else { "_".to_owned() };
        put!(counts, "            {binding} = try arguments.{name}.count(");
        put!(
            counts,
            "                of: {of}, kernel: {}, name: {})",
            quoted(kernel.name),
            quoted(parameter.name)
        );
    }
    if has_generic(&counts) || translated.iter().any(|condition| has_generic(condition)) {
        put!(out, "            let traits = instance.traits");
    }
    out.push_str(&counts);
    for (of, condition) in checked.iter().zip(&translated) {
        put!(out, "            try Flashtile.require(");
        put!(out, "                {condition},");
        put!(
            out,
            "                {}, {}, {})",
            quoted(kernel.name),
            quoted(of.message),
            quoted(of.condition)
        );
    }
}
