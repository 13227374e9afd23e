//! `flashtile kernels`: kernels of the kernel language, listed and printed.

use crate::failure::{Failure, Result};
use crate::nearest;
use crate::output::{self, Destination};
use crate::parse::{codec, count, dtype};
use crate::report::{self, Table};
use clap::{Args, Subcommand, ValueEnum};
use flashtile::kernel::source::{ElementType, GenericKind, Parameter, ParameterKind};
use flashtile::kernel::{Generic, Instance, Kernel, ParamsField, ScalarType, Target};
use flashtile::kernels::{KERNELS, Variant, VariantOption, instance_of, instances};
use flashtile::{Codec, Dtype};
use serde_json::{Value, json};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;

/// Commands about kernels of the kernel language.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  flashtile kernels list\n  \
    flashtile kernels print decode --target msl --head-dim 64 --dtype bf16")]
pub(crate) enum KernelsCommand {
    List(ListArgs),
    Print(PrintArgs),
}

/// List the kernels: where they are defined, what they do, their parameters
///
/// Threads and bytes of shared memory are per threadgroup; with --instances they are given for each instance.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashtile kernels list\n  flashtile kernels list merge\n  \
    flashtile kernels list hadamard --instances")]
pub(crate) struct ListArgs {
    /// Show everything about this kernel
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// List instances, which are kernels with fixed generics, instead of kernels
    #[arg(long)]
    pub(crate) instances: bool,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print the whole source of an instance, ready for a compiler
///
/// An instance is selected by its name, as `flashtile kernels list --instances`, `bench kernels` and `check --json`
/// print it, or by its kernel and options. The defaults of the options describe a bf16 problem of head dimension 128
/// without quantization.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashtile kernels print decode --target cuda --dtype bf16 --k-codec int8 --v-codec tq5\n  \
    flashtile kernels print mask_tiles --target msl\n  \
    flashtile kernels print --all --target msl -o texts"
)]
pub(crate) struct PrintArgs {
    /// Kernel or instance
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Language
    #[arg(long, value_enum)]
    pub(crate) target: SourceTarget,
    #[command(flatten)]
    pub(crate) variant: VariantArgs,
    /// Print every listed instance, or every one of the kernel NAME
    #[arg(long)]
    pub(crate) all: bool,
    /// File to write instead of standard output; with --all a folder with a file for each instance. A file is written
    /// whole or not at all
    #[arg(short, long, value_name = "PATH")]
    pub(crate) output: Option<PathBuf>,
}

/// Options that select an instance of a kernel.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct VariantArgs {
    /// Elements of a q or k vector
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) head_dim: Option<usize>,
    /// Elements of a v vector; default as many as of k
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) value_dim: Option<usize>,
    /// Element type of q and out: f32, f16 or bf16
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    pub(crate) dtype: Option<Dtype>,
    /// Codec of the keys, as in `flashtile run`; default the dtype
    #[arg(long, value_name = "CODEC", value_parser = codec)]
    pub(crate) k_codec: Option<Codec>,
    /// Codec of the values; default the dtype
    #[arg(long, value_name = "CODEC", value_parser = codec)]
    pub(crate) v_codec: Option<Codec>,
}

impl VariantArgs {
    /// The options that were given.
    pub(crate) fn given(&self) -> Vec<VariantOption> {
        let given = [
            (VariantOption::HeadDim, self.head_dim.is_some()),
            (VariantOption::ValueDim, self.value_dim.is_some()),
            (VariantOption::Dtype, self.dtype.is_some()),
            (VariantOption::KCodec, self.k_codec.is_some()),
            (VariantOption::VCodec, self.v_codec.is_some()),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(option, _)| option).collect()
    }

    /// The selected instance, with defaults for options that were not given.
    pub(crate) fn variant(&self) -> Variant {
        let dtype = self.dtype.unwrap_or(Dtype::BF16);
        let head_dim = self.head_dim.unwrap_or(128);
        Variant {
            dtype,
            head_dim,
            value_dim: self.value_dim.unwrap_or(head_dim),
            k_codec: self.k_codec.unwrap_or(Codec::of(dtype)),
            v_codec: self.v_codec.unwrap_or(Codec::of(dtype)),
        }
    }
}

/// A language that kernels are printed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SourceTarget {
    /// Metal Shading Language
    #[value(alias = "metal")]
    Msl,
    /// CUDA C++
    Cuda,
    /// Rust, the original source
    Rust,
}

pub(crate) fn run(command: &KernelsCommand) -> Result<ExitCode> {
    match command {
        KernelsCommand::List(args) => list(args),
        KernelsCommand::Print(args) => print(args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Names of all kernels.
fn names() -> impl Iterator<Item = &'static str> {
    KERNELS.iter().map(|kernel| kernel.name)
}

/// The kernel with a name; `option` is where the name was given.
pub(crate) fn kernel(option: &str, name: &str) -> Result<&'static Kernel> {
    KERNELS.iter().copied().find(|kernel| kernel.name == name).ok_or_else(|| {
        let expected = nearest::expected(name, names());
        Failure::at(option, format_args!("{name} is not a kernel, {expected}"))
    })
}

fn list(args: &ListArgs) -> Result<()> {
    let one = args.name.as_deref().map(|name| kernel("kernels list", name)).transpose()?;
    let all = instances();
    let listed = || KERNELS.iter().copied().filter(|kernel| one.is_none_or(|one| one.name == kernel.name));
    let of = |kernel: &Kernel| all.iter().filter(|i| i.kernel().name == kernel.name).collect::<Vec<_>>();
    if args.instances {
        let chosen: Vec<&Instance> = listed().flat_map(of).collect();
        if args.json {
            return chosen.iter().try_for_each(|instance| report::json(&instance_json(instance)));
        }
        let mut table = Table::new(["instance", "threads", "shared bytes"]);
        for instance in chosen {
            let (threads, shared) = (instance.threads().most(), instance.shared_bytes());
            table.push(vec![instance.entry(), threads.to_string(), shared.to_string()]);
        }
        return report::text(table);
    }
    if args.json {
        return listed().try_for_each(|kernel| report::json(&kernel_json(kernel, &of(kernel))));
    }
    if let Some(kernel) = one {
        return report::text(details(kernel, &of(kernel)));
    }
    let head = ["kernel", "parameters", "generics", "threads", "shared bytes", "instances", "file"];
    let mut table = Table::new(head);
    for kernel in listed() {
        let of = of(kernel);
        table.push(vec![
            kernel.name.to_owned(),
            kernel.parameters.len().to_string(),
            kernel.generics.len().to_string(),
            range(threads(&of)),
            range(shared(&of)),
            of.len().to_string(),
            place(kernel),
        ]);
    }
    let width = KERNELS.iter().map(|kernel| kernel.name.len()).max().unwrap_or(0);
    let what = listed().map(|kernel| format!("{:width$}  {}\n", kernel.name, summary(kernel)));
    report::text(format_args!("{table}\n{}", what.collect::<String>()))
}

/// The first sentence of a kernel's documentation, or its first paragraph if that has no full stop.
fn summary(kernel: &Kernel) -> String {
    let lines = kernel.docs.lines().map(str::trim).skip_while(|line| line.is_empty());
    let paragraph = lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    let end = [". ", ": "].into_iter().filter_map(|end| paragraph.find(end)).min();
    let sentence = end.map_or(paragraph.as_str(), |end| &paragraph[..end]);
    sentence.trim_end_matches('.').to_owned()
}

/// The source file relative to the folder of the crate, and the line.
fn place(kernel: &Kernel) -> String {
    format!("{}:{}", kernel.source.file, kernel.source.line)
}

fn threads(instances: &[&Instance]) -> Option<RangeInclusive<usize>> {
    spread(instances.iter().map(|instance| instance.threads().most() as usize))
}

fn shared(instances: &[&Instance]) -> Option<RangeInclusive<usize>> {
    spread(instances.iter().map(|instance| instance.shared_bytes()))
}

fn spread(numbers: impl Iterator<Item = usize> + Clone) -> Option<RangeInclusive<usize>> {
    Some(numbers.clone().min()?..=numbers.max()?)
}

fn range(numbers: Option<RangeInclusive<usize>>) -> String {
    match numbers {
        None => "-".to_owned(),
        Some(range) if range.start() == range.end() => range.start().to_string(),
        Some(range) => format!("{} to {}", range.start(), range.end()),
    }
}

/// Everything that a launch needs to know about a kernel.
fn details(kernel: &Kernel, instances: &[&Instance]) -> String {
    let mut text = format!("{}  {}\n", kernel.name, place(kernel));
    for line in kernel.docs.lines() {
        text.push_str(&format!("  {}\n", line.trim()));
    }
    let counted = report::counted(instances.len(), "instance");
    let (threads, shared) = (range(threads(instances)), range(shared(instances)));
    text.push_str(&format!(
        "\n{counted}, {threads} threads and {shared} bytes of shared memory per threadgroup\n"
    ));
    let mut section = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            text.push_str(&format!("\n{title}\n"));
            text.extend(lines.into_iter().map(|line| format!("  {line}\n")));
        }
    };
    section("generics", kernel.generics.iter().map(|g| format!("{}: {}", g.name, bound(g.kind))).collect());
    let derived = |of: &flashtile::kernel::source::DerivedGeneric| {
        format!("{}: {} = {}", of.parameter.name, bound(of.parameter.kind), of.expression)
    };
    section("derived generics", kernel.derived.iter().map(derived).collect());
    let parameter = |p: &Parameter| format!("{}: {}", p.name, kind(kernel, p.kind));
    section("parameters", kernel.parameters.iter().map(parameter).collect());
    let requirement =
        |r: &flashtile::kernel::source::Requirement| format!("{}  ({})", r.message, r.condition.trim());
    section("requires", kernel.requirements.iter().map(requirement).collect());
    text
}

/// The kind of a generic parameter, in Rust.
fn bound(kind: GenericKind) -> &'static str {
    match kind {
        GenericKind::Element => "Element",
        GenericKind::Number => "Number",
        GenericKind::Scalar => "Scalar",
        GenericKind::Const(scalar) => scalar.name(),
    }
}

fn element(kernel: &Kernel, element: ElementType) -> &'static str {
    match element {
        ElementType::Scalar(scalar) => scalar.name(),
        ElementType::Generic(n) => {
            let derived = kernel.derived.iter().map(|of| &of.parameter);
            kernel.generics.iter().chain(derived).nth(n).map_or("?", |generic| generic.name)
        }
    }
}

/// The type of a parameter, in Rust.
fn kind(kernel: &Kernel, kind: ParameterKind) -> String {
    match kind {
        ParameterKind::Buffer { element: of, writable: false } => format!("&Buffer<{}>", element(kernel, of)),
        ParameterKind::Buffer { element: of, .. } => format!("&mut Buffer<{}>", element(kernel, of)),
        ParameterKind::Params { cpp, .. } => format!("&{cpp}"),
        ParameterKind::Scalar(scalar) => scalar.name().to_owned(),
        ParameterKind::Constant(scalar) => format!("#[constant] {}", scalar.name()),
    }
}

fn kernel_json(kernel: &Kernel, instances: &[&Instance]) -> Value {
    let ends = |range: Option<RangeInclusive<usize>>| range.map(|range| [*range.start(), *range.end()]);
    let named = |name: &str, of: &str| json!({ "name": name, "type": of });
    json!({
        "kernel": kernel.name,
        "module": kernel.module,
        "file": kernel.source.file,
        "line": kernel.source.line,
        "does": summary(kernel),
        "docs": kernel.docs.trim(),
        "parameters": parameters_json(kernel),
        "generics": kernel.generics.iter().map(|g| named(g.name, bound(g.kind))).collect::<Vec<_>>(),
        "requires": kernel.requirements.iter().map(|r| r.message).collect::<Vec<_>>(),
        "exact": kernel.exact,
        "options": VariantOption::of(kernel).iter().map(|option| option.name()).collect::<Vec<_>>(),
        "threads": ends(threads(instances)),
        "shared_bytes": ends(shared(instances)),
        "instances": instances.len(),
    })
}

/// The parameters in order, each with its index among the buffers or among the constants of a pipeline; structs with their layout.
fn parameters_json(kernel: &Kernel) -> Vec<Value> {
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
fn field_json(field: &ParamsField) -> Value {
    let ParamsField { name, element, len, offset } = *field;
    json!({ "name": name, "type": element.name(), "len": len, "offset": offset })
}

fn instance_json(instance: &Instance) -> Value {
    let kernel = instance.kernel();
    let generics = kernel.generics.iter().zip(instance.generics());
    let generics =
        generics.map(|(parameter, generic)| (parameter.name.to_owned(), json!(generic.to_string())));
    json!({
        "instance": instance.entry(),
        "kernel": kernel.name,
        "generics": generics.collect::<serde_json::Map<_, _>>(),
        "threads": instance.threads().most(),
        "shared_bytes": instance.shared_bytes(),
    })
}

fn print(args: &PrintArgs) -> Result<()> {
    if args.all {
        return print_all(args);
    }
    let Some(name) = &args.name else {
        let names = names().collect::<Vec<_>>().join(", ");
        let what = format_args!("expected a kernel ({names}), an instance or --all");
        return Err(Failure::at("kernels print", what));
    };
    let source = source(&chosen(args, name)?, args.target);
    match &args.output {
        None => report::text(source),
        Some(path) => Destination::new(path)?.text(&source),
    }
}

/// The instance with a name, or that a kernel and options select.
fn chosen(args: &PrintArgs, name: &str) -> Result<Instance> {
    let given = args.variant.given();
    if let Some(kernel) = KERNELS.iter().find(|kernel| kernel.name == name) {
        let known = VariantOption::of(kernel);
        if let Some(option) = given.iter().find(|option| !known.contains(option)) {
            let names = known.iter().map(|option| format!("--{}", option.name())).collect::<Vec<_>>();
            let expected = match &names[..] {
                [] => "it has one instance".to_owned(),
                names => format!("expected {}", names.join(", ")),
            };
            let what = format_args!("does not apply to {name}, {expected}");
            return Err(Failure::at(format_args!("--{}", option.name()), what));
        }
        return instance_of(&args.variant.variant(), kernel).map_err(|why| Failure::at(name, why));
    }
    if let Some(instance) = KERNELS.iter().find_map(|kernel| named(kernel, name)) {
        return match given.first() {
            None => Ok(instance),
            Some(option) => {
                let kernel = instance.kernel().name;
                let what =
                    format_args!("does not apply to {name}, an instance, expected the kernel {kernel}");
                Err(Failure::at(format_args!("--{}", option.name()), what))
            }
        };
    }
    // A name with generics means an instance.
    let of_kernel = |kernel: &&&Kernel| name.starts_with(&format!("{}_", kernel.name));
    let expected = match KERNELS.iter().find(of_kernel) {
        Some(_) => {
            let entries: Vec<String> = instances().iter().map(Instance::entry).collect();
            nearest::expected_some(name, entries.iter().map(String::as_str))
        }
        None => nearest::expected(name, names()),
    };
    let what = format_args!("{name} is neither a kernel nor an instance, {expected}");
    Err(Failure::at("kernels print", what))
}

/// Generics are dimensions, codecs and small counts. Sizes computed from values up to this do not overflow.
const MAX_GENERIC: u32 = u16::MAX as u32;

/// The instance with a name: one that is listed, or one for another shape or tile.
fn named(kernel: &'static Kernel, name: &str) -> Option<Instance> {
    let generics = match name.strip_prefix(kernel.cpp)? {
        "" => Vec::new(),
        rest => rest.strip_prefix('_')?.split('_').collect(),
    };
    let kinds = kernel.generics.iter().map(|generic| generic.kind);
    let generics = (generics.len() == kinds.len()).then(|| {
        generics.iter().zip(kinds).map(|(text, kind)| generic(text, kind)).collect::<Option<Vec<_>>>()
    })??;
    // A number may have other spellings than the one in names.
    Instance::new(kernel, &generics, None).ok().filter(|instance| instance.entry() == name)
}

/// A generic as in names of instances.
fn generic(text: &str, kind: GenericKind) -> Option<Generic> {
    let number = || text.parse::<u32>().ok().filter(|&n| n <= MAX_GENERIC);
    match kind {
        GenericKind::Element => {
            let types = [ScalarType::F32, ScalarType::F16, ScalarType::Bf16];
            types.into_iter().find(|scalar| scalar.name() == text).map(Generic::Type)
        }
        GenericKind::Const(ScalarType::Usize) => number().map(|n| Generic::Usize(n as usize)),
        GenericKind::Const(ScalarType::U32) => number().map(Generic::U32),
        GenericKind::Const(ScalarType::Bool) => text.parse().ok().map(Generic::Bool),
        // No kernel here has other kinds of generics.
        _ => None,
    }
}

/// Writes every listed instance to a file of its own.
fn print_all(args: &PrintArgs) -> Result<()> {
    if let Some(option) = args.variant.given().first() {
        let what = "does not apply with --all, which prints every instance";
        return Err(Failure::at(format_args!("--{}", option.name()), what));
    }
    let Some(folder) = &args.output else {
        return Err(Failure::at("--all", "expected -o DIR, a folder for the files"));
    };
    let chosen = args.name.as_deref().map(|name| kernel("kernels print", name)).transpose()?;
    let wanted = |instance: &Instance| chosen.is_none_or(|kernel| kernel.name == instance.kernel().name);
    let mut files = Vec::new();
    output::folder(folder)?;
    for instance in instances().into_iter().filter(wanted) {
        let path = folder.join(format!("{}.{}", instance.entry(), args.target.extension()));
        files.push((Destination::new(&path)?, instance));
    }
    for (destination, instance) in &files {
        destination.text(&source(instance, args.target))?;
    }
    report::line(format_args!("{} in {}", report::counted(files.len(), "file"), folder.display()))
}

fn source(instance: &Instance, target: SourceTarget) -> String {
    match target {
        SourceTarget::Msl => instance.source(Target::Metal),
        SourceTarget::Cuda => instance.source(Target::Cuda),
        SourceTarget::Rust => instance.rust_source(),
    }
}

impl SourceTarget {
    const fn extension(self) -> &'static str {
        match self {
            Self::Msl => "metal",
            Self::Cuda => "cu",
            Self::Rust => "rs",
        }
    }
}
