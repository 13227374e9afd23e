//! Whole programs of instances, for each target.

use crate::scalar::ScalarType;
use crate::source::{
    Cpp, DerivedGeneric, Generic, Instance, ItemKind, ItemSource, Kernel, Parameter, ParameterKind, Target,
    dependencies, indent, literal,
};
use std::fmt::Write as _;

/// Writing to a `String` does not fail.
macro_rules! put {
    ($out:expr $(, $($arguments:tt)+)?) => {{
        let _ = writeln!($out $(, $($arguments)+)?);
    }};
}

impl Instance {
    /// The whole program: the prelude, the items that the kernel uses, each once and after the items that it uses itself, and the kernel
    /// as [`entry`](Self::entry).
    ///
    /// CUDA compiles it with [`cuda_options`](Self::cuda_options). On Metal the `#[constant]` parameters are function constants, numbered in order from 0, and buffers are the other
    /// parameters, numbered in order from 0, and every kernel is compiled without fast math: infinities and NaN keep their
    /// meaning, and the source itself calls faster functions where a kernel is not [`exact`](crate::source::Kernel::exact).
    pub fn source(&self, target: Target) -> String {
        program(self, target)
    }

    /// The whole program in Rust, as it was written: the items that the kernel uses, each once and after the
    /// items that it uses itself, and the kernel. A comment has the values of the generics.
    pub fn rust_source(&self) -> String {
        rust_program(self)
    }
}

fn program(instance: &Instance, target: Target) -> String {
    let kernel = instance.kernel();
    let mut out = String::new();
    for line in kernel.docs.lines() {
        put!(out, "//{line}");
    }
    put!(out, "// {} of {}:{}", instance.entry(), kernel.source.file, kernel.source.line);
    if kernel.exact {
        put!(out, "#define FT_EXACT 1");
    }
    if target == Target::Cuda && instance.cuda_dynamic_bytes() > 0 {
        put!(out, "#define FT_DYNAMIC 1");
    }
    out.push_str(prelude(target));
    for source in dependencies(&kernel.source) {
        put!(out);
        item(&mut out, source);
    }
    put!(out);
    generics(&mut out, instance);
    entry(&mut out, instance, target);
    out
}

fn rust_program(instance: &Instance) -> String {
    let kernel = instance.kernel();
    let mut out = String::new();
    put!(out, "// {} of {}:{}", instance.entry(), kernel.source.file, kernel.source.line);
    for (parameter, generic) in kernel.generics.iter().zip(instance.generics()) {
        put!(out, "// {} = {generic}", parameter.name);
    }
    for (derived, generic) in derived(instance) {
        put!(out, "// {} = {} = {generic}", derived.parameter.name, derived.expression);
    }
    put!(out, "use flashtile_kernel::prelude::*;");
    let params = |source: &ItemSource| {
        let of = |p: &Parameter| matches!(p.kind, ParameterKind::Params { cpp, .. } if cpp == source.symbol);
        kernel.parameters.iter().any(of)
    };
    for source in dependencies(&kernel.source).into_iter().chain([&kernel.source]) {
        put!(out);
        match source.kind {
            ItemKind::Kernel => {}
            ItemKind::Constant => put!(out, "#[constant]"),
            ItemKind::Struct if params(source) => put!(out, "#[params]"),
            ItemKind::Struct | ItemKind::Function => put!(out, "#[device]"),
        }
        // Where an attribute was taken off, between documentation and item, an empty line is left.
        let mut head = true;
        for line in source.rust.trim_end().lines() {
            head &= line.is_empty() || line.starts_with("///") || line.starts_with("#[");
            if !(head && line.is_empty()) {
                put!(out, "{line}");
            }
        }
    }
    out
}

fn prelude(target: Target) -> &'static str {
    match target {
        Target::Metal => concat!(include_str!("prelude/metal.h"), include_str!("prelude/common.h")),
        Target::Cuda => concat!(include_str!("prelude/cuda.h"), include_str!("prelude/common.h")),
    }
}

fn item(out: &mut String, source: &ItemSource) {
    let name = source.symbol;
    match &source.cpp {
        Cpp::Printed(cpp) => put!(out, "{}", cpp.trim_end()),
        Cpp::Table { element, len: Some(len), literals } => {
            put!(out, "FT_CONSTANT {} {name}[{len}] = {{", element.cpp());
            for line in literals().chunks(8) {
                put!(out, "    {},", line.join(", "));
            }
            put!(out, "}};");
        }
        Cpp::Table { element, len: None, literals } => {
            put!(out, "FT_CONSTEXPR {} {name} = {};", element.cpp(), literals().concat());
        }
    }
}

/// The generics that follow from others, with their values.
fn derived(instance: &Instance) -> impl Iterator<Item = (&'static DerivedGeneric, Generic)> {
    let Kernel { generics, derived, .. } = instance.kernel();
    derived.iter().zip(instance.all_generics()[generics.len()..].iter().copied())
}

fn generics(out: &mut String, instance: &Instance) {
    let chosen = instance.kernel().generics.iter().zip(instance.generics().iter().copied());
    for (parameter, generic) in chosen.chain(derived(instance).map(|(of, value)| (&of.parameter, value))) {
        let name = parameter.cpp;
        let (scalar, raw) = match generic {
            Generic::Type(scalar) => {
                put!(out, "using {name} = {};", scalar.cpp());
                continue;
            }
            Generic::Usize(x) => (ScalarType::Usize, x as u64),
            Generic::U32(x) => (ScalarType::U32, u64::from(x)),
            Generic::I32(x) => (ScalarType::I32, u64::from(x as u32)),
            Generic::Bool(x) => (ScalarType::Bool, u64::from(x)),
        };
        put!(out, "FT_CONSTEXPR {} {name} = {};", scalar.cpp(), literal(scalar, raw));
    }
}

fn entry(out: &mut String, instance: &Instance, target: Target) {
    let kernel = instance.kernel();
    let mut constants = 0;
    for parameter in kernel.parameters {
        if let ParameterKind::Constant(scalar) = parameter.kind {
            let (ty, name) = (scalar.cpp(), parameter.cpp);
            match target {
                Target::Metal => put!(out, "constant {ty} {name} [[function_constant({constants})]];"),
                Target::Cuda => put!(out, "FT_CONSTEXPR {ty} {name} = FT_CONSTANT_{name};"),
            }
            constants += 1;
        }
    }
    let threads = instance.threads().most();
    match target {
        Target::Metal => {
            put!(out, "[[kernel]] [[max_total_threads_per_threadgroup({threads})]]");
            put!(out, "void {}(", instance.entry());
        }
        Target::Cuda => {
            let bounds = match instance.resident() {
                0 => threads.to_string(),
                resident => format!("{threads}, {resident}"),
            };
            put!(out, "extern \"C\" __global__ void __launch_bounds__({bounds})");
            put!(out, "{}(", instance.entry());
        }
    }
    let passed = kernel.parameters.iter().filter(|p| !matches!(p.kind, ParameterKind::Constant(_)));
    let mut lines = Vec::new();
    for (n, parameter) in passed.enumerate() {
        let name = parameter.cpp;
        let ty = match parameter.kind {
            ParameterKind::Buffer { element, .. } => {
                element.of(instance.all_generics()).map_or("void", ScalarType::cpp)
            }
            ParameterKind::Params { cpp, .. } => cpp,
            ParameterKind::Scalar(scalar) | ParameterKind::Constant(scalar) => scalar.cpp(),
        };
        lines.push(match (target, parameter.kind) {
            (Target::Metal, ParameterKind::Buffer { writable: true, .. }) => {
                format!("device {ty}* {name} [[buffer({n})]]")
            }
            (Target::Metal, ParameterKind::Buffer { .. }) => {
                format!("const device {ty}* {name} [[buffer({n})]]")
            }
            (Target::Metal, _) => format!("constant {ty}& {name} [[buffer({n})]]"),
            (Target::Cuda, ParameterKind::Buffer { writable: true, .. }) => {
                format!("{ty}* __restrict__ {name}")
            }
            (Target::Cuda, ParameterKind::Buffer { .. }) => format!("const {ty}* __restrict__ {name}"),
            (Target::Cuda, _) => format!("const {ty} {name}"),
        });
    }
    if target == Target::Metal {
        lines.push("FT_POSITIONS".to_owned());
    }
    let count = lines.len();
    for (n, line) in lines.iter().enumerate() {
        put!(out, "    {line}{}", if n + 1 < count { "," } else { ") {" });
    }
    if count == 0 {
        put!(out, ") {{");
    }
    put!(out, "    const ft_context ft = FT_CONTEXT;");
    if let Cpp::Printed(body) = kernel.source.cpp {
        indent(out, body);
    }
    put!(out, "}}");
}
