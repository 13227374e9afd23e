//! `flashtile bench --from`: the speed of recorded rows beside that of peers. Nothing is measured.

use super::bars::{self, Case, Speed};
use super::options::{BenchArgs, CacheKind, Group};
use super::peers::{self, Key};
use crate::failure::{Failure, Result};
use crate::options::{Backend, Kernels};
use crate::output::Destination;
use crate::report;
use serde_json::Value;
use std::path::Path;
use std::process::ExitCode;

pub(super) fn run(args: &BenchArgs, from: &Path) -> Result<ExitCode> {
    check_options(args)?;
    let svg = args.svg.as_deref().ok_or_else(|| Failure::at("--from", "needs --svg FILE to draw to"))?;
    let picture = Destination::svg(svg)?;
    picture.differs_from(from)?;
    let rows = Rows::read(from, args)?;
    let cases = rows.cases(from)?;
    let alone = rows.peers.iter().filter(|(_, key, _)| !rows.ours.iter().any(|row| row.key == *key)).count();
    if alone > 0 {
        let rows = report::counted(alone, "peer row");
        report::note(format_args!("note: {rows} without a row of flashtile beside, not drawn"));
    }
    picture.text(&bars::document(args.title.as_deref(), cases))?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses options that neither choose rows nor say where the picture goes.
fn check_options(args: &BenchArgs) -> Result<()> {
    if matches!(args.group, Group::Visibility | Group::Kernels) {
        return Err(Failure::at(
            "--from",
            "draws rows of prefill and decode, expected one of these groups or all",
        ));
    }
    let given = [
        ("--backend", args.backend != Backend::Auto),
        ("--kernel", args.kernel.is_some()),
        ("--kernels", args.kernels.choice != Kernels::Auto),
        ("--tile", args.tile.is_some()),
        ("--value-dim", args.value_dim.is_some()),
        ("--cache", args.cache != [CacheKind::Dense]),
        ("--page", args.page.is_some()),
        ("--codec", !args.codec.is_empty()),
        ("--queries", args.queries.is_some()),
        ("--shared", args.shared.is_some()),
        ("--window", args.window.is_some()),
        ("--min-time", args.min_time.is_some()),
        ("--quick", args.quick),
        ("--full", args.full),
        ("--json", args.json),
        ("--json-lines", args.json_lines.is_some()),
        ("--vs", args.vs.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((option, _)) => Err(Failure::at(option, "does not apply to recorded rows (--from)")),
    }
}

/// A row of flashtile.
struct Ours {
    /// Number of the line in the file, from 1.
    line: usize,
    key: Key,
    seconds: f64,
    /// Flop/s of prefill, bytes/s of decode.
    rate: f64,
    limit: f64,
    /// The instruction set or the device.
    unit: String,
    threads: Option<u64>,
    /// Names and seconds of the peers that the row was compared with when it was measured.
    compared: Vec<(String, f64)>,
}

/// Rows of a file that the options select.
struct Rows {
    ours: Vec<Ours>,
    /// Name, problem, seconds.
    peers: Vec<(String, Key, f64)>,
}

impl Rows {
    fn read(path: &Path, args: &BenchArgs) -> Result<Self> {
        let mut rows = Self { ours: Vec::new(), peers: Vec::new() };
        let mut names = Vec::new();
        for (line, value) in peers::lines(path)? {
            let refuse = |what: String| Failure::at(peers::place(path, line), what);
            let entry = peers::entry(&value).map_err(refuse)?;
            if !["prefill", "decode"].contains(&entry.key.kind.as_str()) {
                return Err(refuse(format!("kind {:?}, expected prefill or decode", entry.key.kind)));
            }
            if entry.peer != "flashtile" {
                names.push(entry.peer.clone());
                if selects(args, &entry.key) && args.selects_peer(&entry.peer) {
                    rows.peers.push((entry.peer, entry.key, entry.seconds));
                }
                continue;
            }
            let mut row = ours(line, entry, &value).map_err(refuse)?;
            names.extend(row.compared.iter().map(|(name, _)| name.clone()));
            row.compared.retain(|(name, _)| args.selects_peer(name));
            let unit = args.cpu.isa.is_none_or(|isa| isa.name() == row.unit);
            let threads = args.cpu.threads.is_none_or(|n| row.threads == Some(n as u64));
            if selects(args, &row.key) && unit && threads {
                rows.ours.push(row);
            }
        }
        args.check_peers(path, &names.iter().map(String::as_str).collect::<Vec<_>>())?;
        let compared = rows.ours.iter().any(|row| !row.compared.is_empty());
        if !args.peers.is_empty() && !compared && rows.peers.is_empty() {
            let what =
                format!("{} has rows of these peers, but none that the other options select", path.display());
            return Err(Failure::at(format!("--peers {}", args.peers.join(",")), what));
        }
        Ok(rows)
    }

    /// One case for each problem. Where some have peers, the others are left out.
    fn cases(&self, path: &Path) -> Result<Vec<Case>> {
        let mut keys: Vec<&Key> = Vec::new();
        for row in &self.ours {
            if !keys.contains(&&row.key) {
                keys.push(&row.key);
            }
        }
        if keys.is_empty() {
            return Err(Failure::at(path.display(), "no row of flashtile that these options select"));
        }
        let has_peer = |key: &Key| {
            self.ours.iter().any(|row| row.key == *key && !row.compared.is_empty())
                || self.peers.iter().any(|(_, of, _)| of == key)
        };
        if keys.iter().any(|key| has_peer(key)) {
            keys.retain(|key| has_peer(key));
        }
        keys.into_iter().map(|key| self.case(path, key)).collect()
    }

    /// The last row of a problem, preferably one that was measured together with peers.
    fn case(&self, path: &Path, key: &Key) -> Result<Case> {
        let same = || self.ours.iter().filter(|row| row.key == *key);
        let compared = same().any(|row| !row.compared.is_empty());
        let mut candidates = same().filter(|row| !compared || !row.compared.is_empty());
        let Some(mut ours) = candidates.next() else {
            return Err(Failure::at(path.display(), "no row of flashtile"));
        };
        for row in candidates {
            if (&row.unit, row.threads) != (&ours.unit, ours.threads) {
                let what = format_args!(
                    "the problem of line {} on another processor or with other threads, expected --isa or \
                     --threads to choose one",
                    ours.line
                );
                return Err(Failure::at(peers::place(path, row.line), what));
            }
            ours = row;
        }
        let work = ours.rate * ours.seconds;
        let mut speeds = vec![Speed { name: "flashtile".to_owned(), rate: ours.rate }];
        // The last of several rows of a peer counts, unless one was measured in the same run.
        let of_file = self.peers.iter().filter(|(_, of, _)| of == key).map(|(name, _, s)| (name, *s));
        for (name, seconds) in of_file.chain(ours.compared.iter().map(|(name, s)| (name, *s))) {
            let speed = Speed { name: name.clone(), rate: work / seconds };
            match speeds.iter_mut().find(|of| of.name == speed.name) {
                Some(known) => *known = speed,
                None => speeds.push(speed),
            }
        }
        let (unit, threads) = (ours.unit.clone(), ours.threads);
        Ok(Case { key: key.clone(), unit, threads, limit: ours.limit, speeds })
    }
}

/// Whether the options select a problem.
fn selects(args: &BenchArgs, key: &Key) -> bool {
    let listed = |list: &[usize], n: u64| list.is_empty() || list.iter().any(|&of| of as u64 == n);
    let kind = match args.group {
        Group::Prefill => key.kind == "prefill",
        Group::Decode => key.kind == "decode",
        Group::Visibility | Group::Kernels | Group::All => true,
    };
    let length = |s: u64| args.seq.iter().any(|of| (of.low as u64..=of.high as u64).contains(&s));
    kind && (args.dtype.is_empty() || args.dtype.iter().any(|dtype| dtype.name() == key.dtype))
        && listed(&args.head_dim, key.d)
        && listed(&args.kv_heads, key.hkv)
        && listed(&args.batch, key.b)
        && args.heads.is_none_or(|heads| heads as u64 == key.h)
        && (args.seq.is_empty() || length(key.s))
        && (!args.causal || key.causal)
}

fn ours(line: usize, entry: peers::Entry, value: &Value) -> std::result::Result<Ours, String> {
    let positive = |value: Option<&Value>, name: &str| {
        let number = value.and_then(Value::as_f64).filter(|x| *x > 0.0 && x.is_finite());
        number.ok_or_else(|| format!("expected a positive number {name}"))
    };
    let of_kind = if entry.key.kind == "prefill" { "gflops" } else { "gbytes_per_s" };
    let rate = 1e9 * positive(value.get(of_kind), of_kind)?;
    let limit = positive(value.get("limit_per_s"), "limit_per_s")?;
    // Rows of earlier versions name the instruction set only.
    let unit = value.get("unit").or_else(|| value.get("isa")).and_then(Value::as_str);
    let unit = unit.ok_or("expected a text unit")?.to_owned();
    let threads = match value.get("threads") {
        None | Some(Value::Null) => None,
        Some(n) => Some(n.as_u64().ok_or("expected a whole number threads")?),
    };
    let compared = match value.get("peers") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Object(peers)) => peers
            .iter()
            .map(|(name, of)| {
                // An earlier build that the row was compared with.
                let shown = if name == "flashtile" { "flashtile, earlier" } else { name };
                Ok((shown.to_owned(), positive(of.get("seconds"), &format!("seconds of {name}"))?))
            })
            .collect::<std::result::Result<_, String>>()?,
        Some(_) => return Err("expected an object peers".to_owned()),
    };
    let peers::Entry { key, seconds, .. } = entry;
    Ok(Ours { line, key, seconds, rate, limit, unit, threads, compared })
}
