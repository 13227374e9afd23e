//! Numbers as people read them.

/// `1.23 MiB` and similar: three significant digits.
#[must_use]
pub fn bytes(n: f64) -> String {
    let units = [(1024.0 * 1024.0 * 1024.0, "GiB"), (1024.0 * 1024.0, "MiB"), (1024.0, "KiB")];
    if n < 1024.0 { format!("{n:.0} B") } else { scaled(n, &units) }
}

/// `1 thread`, `2 threads`; `1 entry`, `2 entries`.
#[must_use]
pub fn counted(n: usize, what: &str) -> String {
    format!("{n} {}", noun(n, what))
}

/// `thread` or `threads`, as a number demands.
#[must_use]
pub fn noun(n: usize, what: &str) -> String {
    match what.strip_suffix('y') {
        _ if n == 1 => what.to_owned(),
        Some(stem) if !stem.ends_with(['a', 'e', 'o', 'u']) => format!("{stem}ies"),
        _ => format!("{what}s"),
    }
}

/// `87.3%`.
#[must_use]
pub fn percent(fraction: f64) -> String {
    format!("{:.1}%", fraction * 100.0)
}

/// Three significant digits in the largest unit that is at most the value, or in the smallest unit.
#[must_use]
pub fn scaled(x: f64, units: &[(f64, &str)]) -> String {
    let Some(&(unit, name)) = units.iter().find(|(unit, _)| x >= *unit).or(units.last()) else {
        return x.to_string();
    };
    let y = x / unit;
    let decimals = if y >= 99.95 {
        0
    } else if y >= 9.995 {
        1
    } else {
        2
    };
    format!("{y:.decimals$} {name}")
}
