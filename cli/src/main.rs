//! The command line of flashtile: attention on safetensors files, conformance, plans, measurements.

mod answers;
mod backward;
mod bench;
mod buffer;
mod cached;
mod chart;
#[cfg(feature = "check")]
mod check;
mod command_line;
mod device;
mod escape;
mod failure;
mod gradients;
mod info;
mod input;
mod kernels;
mod kv;
mod machine;
mod names;
mod nearest;
mod nonfinite;
mod numpy;
mod operands;
mod options;
mod output;
mod parse;
mod picture;
mod plan;
mod progress;
mod report;
mod run;
mod select;
mod shell;
mod svg;
mod temporary;
mod timing;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use command_line::{Cli, Command};
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let line: Vec<_> = std::env::args_os().collect();
            let shown = match error.kind() {
                ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                    report::help(&error);
                    Err(command_line::without_subcommand(&line))
                }
                _ if error.use_stderr() => Err(command_line::one_line(&error, &line)),
                _ => report::text(&error),
            };
            return finish(shown.map(|()| ExitCode::SUCCESS));
        }
    };
    finish(match &cli.command {
        Command::Run(args) => run::run(args),
        #[cfg(feature = "check")]
        Command::Check(args) => check::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Info(args) => info::run(args),
        Command::Kv(args) => kv::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Kernels(command) => kernels::run(command),
        Command::Completions(args) => shell::completions(args, Cli::command()),
    })
}

fn finish(outcome: failure::Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|failure| {
        report::note(format_args!("flashtile: {failure}"));
        failure.exit_code()
    })
}
