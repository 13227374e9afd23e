//! `flashtile kv`: what codecs of KV caches would do to given keys and values, and which to use.

mod choice;
mod diagnosis;
mod json;
mod measure;
mod options;
mod pairs;
mod picture;
mod report;
mod text;

use crate::failure::{Failure, REFUSED, Result};
use crate::input::Mapped;
use crate::machine;
use crate::names::canonical;
use crate::output::Destination;
use crate::report as printed;
use choice::Gate;
use measure::{Codecs, Sums, measure};
pub(crate) use options::KvArgs;
use pairs::{Listing, Refusal};
use report::Report;
use std::process::ExitCode;

/// Tensors that change attention probabilities and that the report does not take into account.
const OF_WEIGHTS: [&str; 3] = ["mask", "sinks", "alibi_slopes"];

pub(crate) fn run(args: &KvArgs) -> Result<ExitCode> {
    machine::on_threads(args.threads, || compare(args))
}

fn compare(args: &KvArgs) -> Result<ExitCode> {
    let mapped = Mapped::open(&args.input)?;
    let archive = mapped.archive()?;
    let Listing { pairs, mut refused, unread } = Listing::read(&archive, args)?;
    let picture = args.svg.as_deref().map(Destination::svg).transpose()?;
    picture.as_ref().map_or(Ok(()), |picture| picture.differs_from(&args.input))?;
    if !unread.is_empty() {
        let names = printed::some(&unread);
        if args.strict {
            let what = format_args!("unknown tensors: {names}, expected keys, values, queries, kv_lens");
            return Err(archive.refuse(what));
        }
        printed::note(archive.refuse(format_args!("note: tensors not read: {names}")));
        let of_weights: Vec<&str> =
            unread.iter().map(String::as_str).filter(|name| OF_WEIGHTS.contains(&canonical(name))).collect();
        if !of_weights.is_empty() {
            let names = of_weights.join(", ");
            printed::note(archive.refuse(format_args!("note: the report does not account for {names}")));
        }
    }

    let codecs = Codecs::of(&pairs, args)?;
    if picture.is_some() && !pairs.is_empty() {
        if pairs.iter().all(|pair| !pair.has_queries) {
            return Err(Failure::at("--svg", "KL and NRMSE need queries, which the file lacks"));
        }
        if codecs.values.iter().all(|codec| codec.dtype().is_some()) {
            let what = "only quantizing codecs are drawn, expected one in --codecs, such as int8";
            return Err(Failure::at("--svg", what));
        }
    }
    let measured = measure(&pairs, &codecs, args.rows);
    let mut answered = Vec::new();
    for (pair, measured) in pairs.iter().zip(&measured) {
        match measured {
            Ok(measured) => answered.push((pair, measured)),
            Err(why) => {
                let (name, why) = (&pair.name, archive.refuse(format_args!("{}: {why}", pair.name)));
                refused.push(Refusal { name: name.clone(), why });
            }
        }
    }
    for Refusal { why, .. } in &refused {
        printed::note(format_args!("flashtile: {why}"));
    }
    let status = if refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REFUSED) };
    let all = Sums::total(answered.iter().map(|(_, measured)| &measured.all));
    let gate = Gate { kl: args.max_kl, nrmse: args.max_nrmse };
    let candidates = choice::candidates(&answered, &codecs);
    let choice = choice::choose(&candidates, &codecs, gate);
    let (candidates, unread, refused) = (&candidates[..], &unread[..], &refused[..]);
    let report =
        Report { args, codecs: &codecs, gate, pairs: answered, refused, unread, all, candidates, choice };
    if let (Some(picture), Some(all)) = (picture, &report.all) {
        picture::draw(&report, all, &picture)?;
    }
    if args.json {
        printed::json(&report.json())?;
    } else if let Some(all) = &report.all {
        printed::text(report.text(all))?;
    }
    Ok(status)
}
