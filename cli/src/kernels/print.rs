//! `flashtile kernels print`.

use super::select::{Set, VariantArgs, kernel, kernel_name, names};
use crate::failure::{Failure, Result};
use crate::output::{self, Destination};
use crate::report;
use clap::{Args, ValueEnum};
use flashtile::kernel::{Instance, Target};
use flashtile::kernels::{instance_of, instances};
use std::path::PathBuf;

/// Print the whole source of an instance, ready for a compiler
///
/// An instance is selected by its name, as `flashtile kernels list --instances` and `check --json` print it, or by its
/// kernel and options. The defaults of the options describe a bf16 problem of head dimension 128 without quantization.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashtile kernels print decode --target cuda --dtype bf16 --k-codec int8 --v-codec tq5\n  \
    flashtile kernels print mask_tiles --target msl\n  \
    flashtile kernels print --all --target msl -o texts"
)]
pub(crate) struct PrintArgs {
    /// Kernel or instance
    #[arg(value_name = "NAME", value_parser = kernel_name(), hide_possible_values = true)]
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

pub(super) fn print(args: &PrintArgs) -> Result<()> {
    if args.all {
        return print_all(args);
    }
    let Some(name) = &args.name else {
        let names = names().collect::<Vec<_>>().join(", ");
        let what = format_args!("expected a kernel ({names}), an instance or --all");
        return Err(Failure::at("kernels print", what));
    };
    let set = Set { command: "kernels print", instance_of };
    let chosen = set.chosen(&args.variant, &[name])?;
    let source: String = chosen.iter().map(|instance| source(instance, args.target)).collect();
    match &args.output {
        None => report::text(source),
        Some(path) => Destination::new(path)?.text(&source),
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
    pub(super) const fn extension(self) -> &'static str {
        match self {
            Self::Msl => "metal",
            Self::Cuda => "cu",
            Self::Rust => "rs",
        }
    }
}
