//! The command line: its commands, and parser errors on one line.

use crate::bench::BenchArgs;
#[cfg(feature = "check")]
use crate::check::CheckArgs;
use crate::failure::Failure;
use crate::info::InfoArgs;
use crate::kernels::KernelsCommand;
use crate::kv::KvArgs;
use crate::plan::PlanArgs;
use crate::report;
use crate::run::RunArgs;
use crate::shell::CompletionsArgs;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsStr;

/// Fused attention on safetensors files, and what it reaches on this machine
#[derive(Debug, Parser)]
#[command(name = "flashtile", version, max_term_width = 110)]
#[command(after_help = "Example:\n  flashtile run qkv.safetensors -o out.safetensors --causal\n\n\
    Exit status: 0, 1 where an answer is wrong (run, check, bench), 2 for bad input.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    #[cfg(feature = "check")]
    Check(CheckArgs),
    Plan(PlanArgs),
    Kv(KvArgs),
    Info(InfoArgs),
    Bench(BenchArgs),
    /// List the kernels of the kernel language, print them as Metal, CUDA or Rust, and export them for other programs
    #[command(subcommand)]
    Kernels(KernelsCommand),
    Completions(CompletionsArgs),
}

/// The parser's error message on one line, without usage, with a suggestion if there is one.
pub(crate) fn one_line<S: AsRef<OsStr>>(error: &clap::Error, line: &[S]) -> Failure {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let message = lines.join(" ");
    let mut message = message.strip_prefix("error: ").unwrap_or(&message).to_owned();
    let meant = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue]
        .map(|kind| strings(error, kind))
        .concat();
    let meant: Vec<String> = meant.iter().map(|name| format!("'{name}'")).collect();
    if error.kind() == ErrorKind::MissingRequiredArgument {
        let missing = strings(error, ContextKind::InvalidArg);
        message = format!("missing {}: {}", report::noun(missing.len(), "argument"), missing.join(", "));
    } else if !meant.is_empty() {
        message.push_str(&format!(" (did you mean {}?)", meant.join(" or ")));
    } else if error.kind() == ErrorKind::InvalidSubcommand {
        message.push_str(&format!(", expected {}", subcommands(line)));
    }
    Failure::new(format_args!("{message}; see --help"))
}

/// Strings of one kind in the context of an error.
fn strings(error: &clap::Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    }
}

/// The failure of a command line that lacks a subcommand.
pub(crate) fn without_subcommand<S: AsRef<OsStr>>(line: &[S]) -> Failure {
    Failure::new(format_args!("a subcommand is needed, expected {}", subcommands(line)))
}

/// Names of the subcommands that may follow the subcommands on a command line.
fn subcommands<S: AsRef<OsStr>>(line: &[S]) -> String {
    let root = Cli::command();
    let mut command = &root;
    for name in line.iter().skip(1) {
        let Some(next) = command.find_subcommand(name) else { break };
        command = next;
    }
    command.get_subcommands().map(clap::Command::get_name).collect::<Vec<_>>().join(", ")
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
            (vec!["flashtile", "kernel", "list"], " (did you mean 'kernels'?); see --help"),
            (vec!["flashtile", "kernels", "lst"], " (did you mean 'list'?); see --help"),
            (vec!["flashtile", "jump"], ", expected run, check, plan, kv, "),
            (vec!["flashtile", "kernels", "jump"], ", expected list, print, export; see --help"),
        ];
        for (line, why) in cases {
            let shown = one_line(&Cli::try_parse_from(&line).unwrap_err(), &line).to_string();
            assert!(shown.starts_with("unrecognized subcommand ") && shown.contains(why), "{shown}");
        }
    }

    #[test]
    fn misspelt_options_and_values() {
        let run = ["flashtile", "run", "a", "-o", "b"];
        let cases = [
            (&["--ouput", "c"][..], "unexpected argument '--ouput' found (did you mean '--output'?"),
            (&["--centered"], "(did you mean '--center"),
            (&["--layout", "bsdh"], "[possible values: bhsd, bshd] (did you mean 'bshd'"),
        ];
        for (more, why) in cases {
            let line = [&run[..], more].concat();
            let shown = one_line(&Cli::try_parse_from(&line).unwrap_err(), &line).to_string();
            assert!(shown.contains(why), "{shown}");
        }
    }

    #[test]
    fn missing_arguments_are_listed() {
        let shown = |line: &[&str]| one_line(&Cli::try_parse_from(line).unwrap_err(), line).to_string();
        assert_eq!(shown(&["flashtile", "run"]), "missing arguments: --output <OUT>, <IN>; see --help");
        assert_eq!(shown(&["flashtile", "run", "a"]), "missing argument: --output <OUT>; see --help");
    }

    #[test]
    fn a_line_without_subcommand() {
        for (line, expected) in
            [(vec!["flashtile"], "run, check, "), (vec!["flashtile", "kernels"], "list, print, export")]
        {
            let error = Cli::try_parse_from(&line).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand);
            let shown = without_subcommand(&line).to_string();
            assert!(shown.starts_with(&format!("a subcommand is needed, expected {expected}")), "{shown}");
        }
    }

    #[test]
    fn errors_are_one_line() {
        let lines = [
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
