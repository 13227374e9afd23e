//! The command line: its commands, and parser errors on one line.

use crate::bench::BenchArgs;
use crate::check::CheckArgs;
use crate::failure::Failure;
use crate::info::InfoArgs;
use crate::kernels::KernelsCommand;
use crate::kv::KvArgs;
use crate::nearest;
use crate::plan::PlanArgs;
use crate::run::RunArgs;
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsStr;

/// Fused attention on safetensors files, and what it reaches on this machine
#[derive(Debug, Parser)]
#[command(name = "flashtile", version, arg_required_else_help = false, max_term_width = 110)]
#[command(after_help = "Example:\n  flashtile run qkv.safetensors -o out.safetensors --causal\n\n\
    Exit status: 0, 1 where a check or a benchmark's answer fails, 2 for bad input.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Check(CheckArgs),
    Plan(PlanArgs),
    Kv(KvArgs),
    Info(InfoArgs),
    Bench(BenchArgs),
    /// List the kernels of the kernel language, and print them as Metal, CUDA or Rust
    #[command(subcommand)]
    Kernels(KernelsCommand),
}

/// The parser's error message without usage, on one line.
pub(crate) fn one_line<S: AsRef<OsStr>>(error: &clap::Error, line: &[S]) -> Failure {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let message = lines.join(" ");
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(given)) => {
            Failure::new(format_args!("{message}, {}; see --help", subcommand(given, line)))
        }
        _ => Failure::new(format_args!("{message}; see --help")),
    }
}

/// The subcommand that `given` may be a misspelling of, after the subcommands that precede it.
fn subcommand<S: AsRef<OsStr>>(given: &str, line: &[S]) -> String {
    let root = Cli::command();
    let mut command = &root;
    for name in line.iter().skip(1) {
        let Some(next) = command.find_subcommand(name) else { break };
        command = next;
    }
    nearest::meant(given, command.get_subcommands().map(clap::Command::get_name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn misspelt_subcommands() {
        let cases = [
            (vec!["flashtile", "kernel", "list"], "did you mean kernels; see --help"),
            (vec!["flashtile", "kernels", "lst"], "did you mean list; see --help"),
            (vec!["flashtile", "jump"], "expected "),
        ];
        for (line, why) in cases {
            let shown = one_line(&Cli::try_parse_from(&line).unwrap_err(), &line).to_string();
            assert!(shown.starts_with("unrecognized subcommand ") && shown.contains(why), "{shown}");
        }
    }

    #[test]
    fn errors_are_one_line() {
        let lines = [
            vec!["flashtile"],
            vec!["flashtile", "jump"],
            vec!["flashtile", "run"],
            vec!["flashtile", "run", "a", "-o", "b", "--layout", "x\n\ny"],
            vec!["flashtile", "run", "a", "-o", "b", "--dtype", "f64"],
            vec!["flashtile", "plan", "a", "--batch", "2"],
        ];
        for line in lines {
            let shown = one_line(&Cli::try_parse_from(&line).unwrap_err(), &line).to_string();
            assert!(
                !shown.contains('\n') && shown.ends_with("; see --help") && shown.len() > 20,
                "{line:?}: {shown}"
            );
        }
    }
}
