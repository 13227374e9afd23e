//! `flashtile kernels export`: a folder of kernels for programs in other languages than Rust.

use super::manifest::{MANIFEST, file, manifest};
use super::select::{Set, VariantArgs, kernel, kernel_name};
use crate::failure::{Failure, Result};
use crate::output::NewFolder;
use crate::report;
use clap::{Args, ValueEnum};
use flashtile::kernel::{Instance, Limits, Target};
use flashtile::kernels::{metal_instance_of, metal_instances};
use std::path::PathBuf;

/// Write kernels for programs without Rust: Metal sources and a manifest
///
/// DIR gets a Metal source for each instance, and manifest.json with all that a launch needs: bindings, layouts of
/// structs, function constants, threads, conditions. DIR must not exist, and is written whole or not at all.
///
/// Without names, every listed instance is written. The name of an instance selects it; the name of a kernel selects
/// its instance for the options, or with --all every listed one. The defaults of the options describe a bf16 problem of
/// head dimension 128 without quantization. The listed instances of prefill and of the backward pass are the ones that
/// fit Apple's GPUs, where a threadgroup has 32 KiB of memory; the backward pass is listed for head dimensions 64 and 128.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashtile kernels export kernels --target metal\n  \
    flashtile kernels export kernels prefill decode merge --target metal --head-dim 64 --dtype f16\n  \
    flashtile kernels export kernels encode read_codes --all --target metal")]
pub(crate) struct ExportArgs {
    /// Folder to write, which does not exist yet
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// Kernels or instances; default all that are listed
    #[arg(value_name = "NAME", value_parser = kernel_name(), hide_possible_values = true)]
    pub(crate) names: Vec<String>,
    /// Platform of the programs
    #[arg(long, value_enum)]
    pub(crate) target: ExportTarget,
    #[command(flatten)]
    pub(crate) variant: VariantArgs,
    /// Write every listed instance of the kernels NAME
    #[arg(long)]
    pub(crate) all: bool,
}

/// The platform of exported kernels. Hidden targets are refused with the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportTarget {
    /// Apple's GPUs, by Metal
    #[value(alias = "msl")]
    Metal,
    #[value(hide = true)]
    Cuda,
    #[value(hide = true)]
    Rust,
}

/// Writes the folder.
pub(super) fn export(args: &ExportArgs) -> Result<()> {
    let other = match args.target {
        ExportTarget::Metal => None,
        ExportTarget::Cuda => Some("cuda"),
        ExportTarget::Rust => Some("rust"),
    };
    if let Some(other) = other {
        let what = format_args!(
            "kernels are exported for metal only; flashtile kernels print --all --target {other} -o DIR writes their sources"
        );
        return Err(Failure::at(format_args!("--target {other}"), what));
    }
    let instances = selected(args)?;
    let folder = NewFolder::new(&args.folder)?;
    for instance in &instances {
        folder.text(&file(instance), &instance.source(Target::Metal))?;
    }
    folder.text(MANIFEST, &manifest(&instances))?;
    folder.finish()?;
    let (count, place) = (report::counted(instances.len(), "kernel"), args.folder.display());
    report::line(format_args!("{count} and {MANIFEST} in {place}"))
}

/// The instances to write, in the order of their names.
fn selected(args: &ExportArgs) -> Result<Vec<Instance>> {
    let names: Vec<&str> = args.names.iter().map(String::as_str).collect();
    let mut chosen = if args.all || names.is_empty() {
        if let Some(option) = args.variant.given().first() {
            let what = "does not apply where every listed instance is written, expected kernels by NAME, without --all";
            return Err(Failure::at(format_args!("--{}", option.name()), what));
        }
        let kernels =
            names.iter().map(|name| kernel("kernels export --all", name)).collect::<Result<Vec<_>>>()?;
        let wanted = |of: &Instance| kernels.iter().any(|kernel| kernel.name == of.kernel().name);
        metal_instances().into_iter().filter(|instance| kernels.is_empty() || wanted(instance)).collect()
    } else {
        let set = Set { command: "kernels export", instance_of: metal_instance_of };
        set.chosen(&args.variant, &names)?
    };
    let limit = Limits::default().shared_bytes;
    if let Some(large) = chosen.iter().find(|instance| instance.shared_bytes() > limit) {
        let bytes = large.shared_bytes();
        let what =
            format_args!("needs {bytes} bytes of threadgroup memory, expected at most the {limit} of Metal");
        return Err(Failure::at(large.entry(), what));
    }
    chosen.sort_by_key(Instance::entry);
    chosen.dedup_by_key(|instance| instance.entry());
    Ok(chosen)
}
