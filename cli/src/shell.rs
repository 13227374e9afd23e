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
}
