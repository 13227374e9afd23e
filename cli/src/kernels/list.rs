//! `flashtile kernels list`.

use super::describe::{bound, kind, parameters_json, place, summary};
use super::select::{kernel, kernel_name};
use crate::failure::Result;
use crate::report::{self, Table};
use clap::Args;
use flashtile::kernel::source::Parameter;
use flashtile::kernel::{Instance, Kernel};
use flashtile::kernels::{KERNELS, VariantOption, instances};
use serde_json::{Value, json};
use std::ops::RangeInclusive;

/// List the kernels: where they are defined, what they do, their parameters
///
/// Threads and bytes of shared memory are per threadgroup; with --instances they are given for each instance.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashtile kernels list\n  flashtile kernels list merge\n  \
    flashtile kernels list hadamard --instances")]
pub(crate) struct ListArgs {
    /// Show everything about this kernel
    #[arg(value_name = "NAME", value_parser = kernel_name(), hide_possible_values = true)]
    pub(crate) name: Option<String>,
    /// List instances, which are kernels with fixed generics, instead of kernels
    #[arg(long)]
    pub(crate) instances: bool,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}

pub(super) fn list(args: &ListArgs) -> Result<()> {
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
