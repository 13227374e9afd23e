//! `flashtile completions`: scripts for shells, generated from the options.

use crate::failure::Result;
use crate::report;
use clap::{Args, Command};
use clap_complete::Shell;
use std::process::ExitCode;

/// Print a script that completes commands and options in a shell
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashtile completions bash > ~/.local/share/bash-completion/completions/flashtile\n  \
    flashtile completions fish > ~/.config/fish/completions/flashtile.fish"
)]
pub(crate) struct CompletionsArgs {
    /// Shell
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

pub(crate) fn completions(args: &CompletionsArgs, command: Command) -> Result<ExitCode> {
    report::text(script(args.shell, command))?;
    Ok(ExitCode::SUCCESS)
}

fn script(shell: Shell, mut command: Command) -> String {
    let mut script = Vec::new();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::Cli;
    use clap::{CommandFactory, ValueEnum};

    /// Names of the subcommands, and of their visible options.
    fn names(command: &Command) -> Vec<(String, Vec<String>)> {
        let subcommand = |command: &Command| {
            let long =
                command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(|arg| arg.get_long());
            let long: Vec<String> = long.map(str::to_owned).collect();
            let mut all = vec![(command.get_name().to_owned(), long)];
            all.extend(names(command));
            all
        };
        command.get_subcommands().flat_map(subcommand).collect()
    }

    fn built() -> Command {
        let mut command = Cli::command().disable_help_subcommand(true);
        command.build();
        command
    }

    #[test]
    fn scripts_know_every_command_and_option() {
        let names = names(&built());
        assert!(names.iter().any(|(name, long)| name == "run" && long.contains(&"strict".to_owned())));
        for shell in Shell::value_variants() {
            let script = script(*shell, Cli::command());
            for (name, long) in &names {
                assert!(script.contains(name.as_str()), "{name} for {shell}");
                for option in long {
                    // fish writes options without hyphens.
                    let written =
                        if *shell == Shell::Fish { format!("-l {option} ") } else { format!("--{option}") };
                    let at_end = written.trim_end().to_owned() + "\n";
                    assert!(
                        script.contains(&written) || script.contains(&at_end),
                        "{name} --{option} for {shell}"
                    );
                }
            }
        }
    }

    /// Options whose values are not names of a closed set: numbers, lists of numbers, files, names in a file.
    const OPEN: [&str; 37] = [
        "batch",
        "cached",
        "chunk",
        "device-file",
        "equalize",
        "equalize-keys",
        "filter",
        "head-dim",
        "heads",
        "json-lines",
        "keep-first",
        "keep-last",
        "kv-heads",
        "kv-len",
        "kv-lens",
        "max-kl",
        "max-nrmse",
        "min-time",
        "output",
        "page",
        "prefix",
        "q-len",
        "queries",
        "rows",
        "scale",
        "seeds",
        "seq",
        "sequence",
        "shard",
        "shared",
        "softcap",
        "splits",
        "svg",
        "threads",
        "value-dim",
        "vs",
        "window",
    ];

    /// Every option of a command that takes a value, with the values that it knows.
    fn values(command: &Command) -> Vec<(String, Vec<String>)> {
        let takes_value = |arg: &&clap::Arg| !arg.is_hide_set() && arg.get_action().takes_values();
        let of = |arg: &clap::Arg| {
            let values = arg.get_value_parser().possible_values().into_iter().flatten();
            let values = values.filter(|value| !value.is_hide_set()).map(|value| value.get_name().to_owned());
            (arg.get_long().unwrap_or_default().to_owned(), values.collect())
        };
        let own = command.get_arguments().filter(takes_value).map(of);
        own.chain(command.get_subcommands().flat_map(values)).collect()
    }

    #[test]
    fn scripts_know_the_values_of_every_closed_set() {
        let all = values(&built());
        for (option, values) in &all {
            let is_open = option.is_empty() || OPEN.contains(&option.as_str());
            assert!(is_open || !values.is_empty(), "--{option} knows no values");
        }
        assert!(OPEN.iter().all(|open| all.iter().any(|(option, _)| option == open)));
        for (option, value) in [
            ("k-codec", "mlx-tq8-plain"),
            ("codecs", "tq5"),
            ("codec", "int8"),
            ("dtype", "bf16"),
            ("isa", "avx512bf16"),
            ("backend", "cuda"),
            ("device", "m3-max"),
            ("kernels", "portable"),
            ("layout", "bshd"),
            ("q-offset", "bottom-right"),
            ("cache", "ring"),
            ("target", "cuda"),
        ] {
            let known = |(name, values): &&(String, Vec<String>)| {
                name == option && values.iter().any(|of| of == value)
            };
            assert!(all.iter().find(known).is_some(), "--{option} {value}");
            for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
                assert!(script(shell, Cli::command()).contains(value), "--{option} {value} for {shell}");
            }
        }
        // Names of kernels are values of an argument.
        assert!(
            all.iter().any(|(option, values)| option.is_empty() && values.contains(&"mask_tiles".to_owned()))
        );
    }
}
