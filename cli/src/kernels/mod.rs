//! `flashtile kernels`: kernels of the kernel language, listed, printed and exported.

mod describe;
mod export;
mod list;
mod manifest;
mod print;
pub(crate) mod select;

use crate::failure::Result;
use clap::Subcommand;
use std::process::ExitCode;

/// Commands about kernels of the kernel language.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  flashtile kernels list\n  \
    flashtile kernels print decode --target msl --head-dim 64 --dtype bf16\n  \
    flashtile kernels export kernels prefill decode merge --target metal")]
pub(crate) enum KernelsCommand {
    List(list::ListArgs),
    Print(print::PrintArgs),
    Export(export::ExportArgs),
}

pub(crate) fn run(command: &KernelsCommand) -> Result<ExitCode> {
    match command {
        KernelsCommand::List(args) => list::list(args),
        KernelsCommand::Print(args) => print::print(args),
        KernelsCommand::Export(args) => export::export(args),
    }?;
    Ok(ExitCode::SUCCESS)
}
