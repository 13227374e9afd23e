//! `flashtile completions` and `flashtile man`: what shells and `man` read, generated from the options.

use crate::failure::{Failure, Result};
use crate::output::{self, Destination};
use crate::report;
use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use std::path::PathBuf;
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

/// Write a manual page for each command
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  flashtile man man1 && man ./man1/flashtile-run.1")]
pub(crate) struct ManArgs {
    /// Folder for the pages, which is created if it does not exist
    #[arg(value_name = "DIR")]
    folder: PathBuf,
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

pub(crate) fn man(args: &ManArgs, command: Command) -> Result<ExitCode> {
    let folder = &args.folder;
    output::folder(folder)?;
    let pages = pages(command)?;
    let files = pages.iter().map(|page| Destination::new(&folder.join(format!("{}.1", page.name))));
    let files = files.collect::<Result<Vec<_>>>()?;
    files.iter().zip(&pages).try_for_each(|(file, page)| file.text(&page.source))?;
    report::line(format_args!("{} in {}", report::counted(pages.len(), "page"), folder.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// A manual page.
struct Page {
    /// Name of the command: `flashtile-kernels-list`.
    name: String,
    /// roff.
    source: String,
}

/// The pages of a command and of its subcommands.
fn pages(command: Command) -> Result<Vec<Page>> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add_pages(&command, &mut pages)?;
    Ok(pages)
}

fn add_pages(command: &Command, pages: &mut Vec<Page>) -> Result<()> {
    let man = Man::new(command.clone()).source(concat!("flashtile ", env!("CARGO_PKG_VERSION")));
    let mut source = Vec::new();
    man.render(&mut source).map_err(Failure::new)?;
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    pages.push(Page { name, source: String::from_utf8_lossy(&source).into_owned() });
    command.get_subcommands().try_for_each(|subcommand| add_pages(subcommand, pages))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::Cli;
    use clap::{CommandFactory, ValueEnum};

    /// Names of the subcommands, of their visible options, and of the page of each.
    fn names(command: &Command) -> Vec<(String, Vec<String>, String)> {
        let subcommand = |command: &Command| {
            let long =
                command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(|arg| arg.get_long());
            let long: Vec<String> = long.map(str::to_owned).collect();
            let page = command.get_display_name().unwrap_or_default().to_owned();
            let mut all = vec![(command.get_name().to_owned(), long, page)];
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
        assert!(names.iter().any(|(name, long, _)| name == "run" && long.contains(&"strict".to_owned())));
        for shell in Shell::value_variants() {
            let script = script(*shell, Cli::command());
            for (name, long, _) in &names {
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

    #[test]
    fn pages_describe_every_command_and_option() {
        let pages = pages(Cli::command()).unwrap();
        let all = names(&built());
        assert_eq!(pages.len(), all.len() + 1);
        for (name, long, page) in all {
            let page = pages.iter().find(|of| of.name == page).unwrap();
            assert!(page.name.ends_with(&format!("-{name}")), "{}", page.name);
            for option in long {
                // A hyphen is escaped in roff.
                let written = format!("\\-\\-{}", option.replace('-', "\\-"));
                assert!(page.source.contains(&written), "{name} --{option}: {}", page.source);
            }
        }
    }
}
