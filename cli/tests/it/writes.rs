//! Output files and the checks of input files, on systems with signals, pipes and permission bits.

use crate::files::{Folder, assert_refused, qkv, stderr};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use safetensors::tensor::Dtype;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Signals that end a process and can be handled.
const SIGNALS: [Signal; 10] = [
    Signal::INT,
    Signal::TERM,
    Signal::HUP,
    Signal::QUIT,
    Signal::ALARM,
    Signal::PROF,
    Signal::USR1,
    Signal::USR2,
    Signal::VTALARM,
    Signal::XCPU,
];

/// Signals that end a process at once.
#[cfg(target_os = "linux")]
const AT_ONCE: [Signal; 3] = [Signal::KILL, Signal::ABORT, Signal::ILL];

/// A command that ignores no signals. It would ignore some if a shell had started the tests in the background.
#[allow(unsafe_code)]
fn attentive(program: &str) -> Command {
    let mut command = Command::new(program);
    let listen = || {
        for signal in SIGNALS {
            // SAFETY: every signal has a default action.
            unsafe { libc::signal(signal.as_raw(), libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec, the function only calls signal(2), which is async-signal-safe.
    unsafe { command.pre_exec(listen) };
    command
}

fn program() -> Command {
    attentive(env!("CARGO_BIN_EXE_flashtile"))
}

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// Output of a command, which is killed if it does not end within a minute.
fn within_a_minute(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("{command:?} waits");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Query rows of a file that takes a while to write but nothing to compute: there are no keys.
const ROWS: u64 = 1 << 15;

/// A sparse file of queries: its zeros take no space.
fn queries(path: &Path) {
    let end = ROWS * 512 * 4;
    let empty = format!(r#"{{"dtype":"F32","shape":[1,1,0,512],"data_offsets":[{end},{end}]}}"#);
    let q = format!(r#"{{"dtype":"F32","shape":[1,1,{ROWS},512],"data_offsets":[0,{end}]}}"#);
    let header = format!(r#"{{"q":{q},"k":{empty},"v":{empty}}}"#);
    let file = std::fs::File::create(path).unwrap();
    file.write_at(&(header.len() as u64).to_le_bytes(), 0).unwrap();
    file.write_at(header.as_bytes(), 8).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
}

/// Stops a command while it writes. `command` removes the output of an earlier one.
fn stopped_in_a_write(command: impl Fn() -> Command, is_writing: impl Fn(&Child) -> bool) -> Child {
    for _ in 0..50 {
        let mut child = command().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while !is_writing(&child) && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        if kill_process(pid(&child), Signal::STOP).is_ok()
            && let Ok(Some((_, status))) = waitpid(Some(pid(&child)), WaitOptions::UNTRACED)
            && status.stopped()
            && is_writing(&child)
        {
            return child;
        }
        // The command had written everything before it was stopped.
        let _ = child.kill();
        let _ = child.wait();
    }
    panic!("no command was stopped in its write");
}

/// Returns true if a process has written to an output file, which has no name yet.
#[cfg(target_os = "linux")]
fn has_written(child: &Child, folder: &Path) -> bool {
    let Ok(open) = std::fs::read_dir(format!("/proc/{}/fd", child.id())) else { return false };
    open.flatten().map(|entry| entry.path()).any(|file| {
        let target = std::fs::read_link(&file).unwrap_or_default();
        target.starts_with(folder)
            && target.to_string_lossy().ends_with(" (deleted)")
            && std::fs::metadata(&file).is_ok_and(|written| written.len() > 0)
    })
}

/// Nothing is left, whatever ends the process. No handler removes the file: it has no name before it is whole.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_in_a_write_leaves_nothing() {
    let folder = Folder::empty();
    queries(&folder.input);
    let path = std::fs::canonicalize(folder.path()).unwrap();
    // A new file, and one that is replaced.
    for (n, signal) in SIGNALS.into_iter().chain(AT_ONCE).enumerate() {
        let before = (n % 2 == 1).then_some(b"old");
        let command = || {
            let _ = std::fs::remove_file(&folder.output);
            if let Some(old) = before {
                std::fs::write(&folder.output, old).unwrap();
            }
            let mut command = program();
            command.arg("run").arg(&folder.input).arg("-o").arg(&folder.output);
            command.args(["--backend", "cpu", "--threads", "1", "--isa", "portable"]);
            command
        };
        let mut child = stopped_in_a_write(command, |child| has_written(child, &path));
        kill_process(pid(&child), signal).unwrap();
        kill_process(pid(&child), Signal::CONT).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(signal.as_raw()), "{signal:?}: {status}");
        let names = folder.names();
        assert!(names.iter().all(|name| !name.starts_with('.')), "{signal:?}: {names:?}");
        assert_eq!(std::fs::read(&folder.output).ok().as_deref(), before.map(|old| &old[..]), "{signal:?}");
    }
}

#[test]
fn a_signal_in_an_export_leaves_nothing() {
    let folder = Folder::empty();
    let kernels = folder.path().join("kernels");
    for signal in SIGNALS {
        let command = || {
            let _ = std::fs::remove_dir_all(&kernels);
            let mut command = program();
            command.args(["kernels", "export", "--target", "metal"]).arg(&kernels);
            command
        };
        let is_writing = |_: &Child| folder.names().iter().any(|name| name.starts_with(".flashtile-"));
        let mut child = stopped_in_a_write(command, is_writing);
        kill_process(pid(&child), signal).unwrap();
        kill_process(pid(&child), Signal::CONT).unwrap();
        let status = child.wait().unwrap();
        // The export may have ended before the signal was handled.
        assert!(status.signal() == Some(signal.as_raw()) || status.success(), "{signal:?}: {status}");
        let names = folder.names();
        assert!(names.iter().all(|name| !name.starts_with('.')), "{signal:?}: {names:?}");
        if status.success() {
            assert!(std::fs::read_dir(&kernels).unwrap().count() > 500, "{signal:?}");
        }
    }
}

/// Adds the arguments of a benchmark that takes an hour, and starts it. Once it has printed a line, it has checked
/// that it can write its file.
fn endless_benchmark(command: &mut Command, folder: &Folder) -> Child {
    let mut child = command
        .args(["bench", "prefill", "--seq", "64", "--head-dim", "64", "--dtype", "f32", "--threads", "1"])
        .args(["--isa", "portable", "--min-time", "3600", "--json-lines"])
        .arg(&folder.output)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("portable"), "{line}");
    child
}

#[test]
fn a_signal_ends_the_process() {
    let folder = Folder::empty();
    for signal in SIGNALS {
        let mut child = endless_benchmark(&mut program(), &folder);
        kill_process(pid(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(signal.as_raw()), "{signal:?}");
        assert!(folder.names().is_empty(), "{:?}", folder.names());
    }
}

/// Starts the program from a shell after a setting.
fn after(set: &str, folder: &Folder, options: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{set}; exec \"$0\" \"$@\"")).arg(env!("CARGO_BIN_EXE_flashtile"));
    within_a_minute(command.arg("run").arg(&folder.input).arg("-o").arg(&folder.output).args(options))
}

#[test]
fn signals_that_were_ignored_stay_ignored() {
    let folder = Folder::empty();
    let mut shell = attentive("sh");
    shell.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_flashtile")]);
    let mut child = endless_benchmark(&mut shell, &folder);
    kill_process(pid(&child), Signal::HUP).unwrap();
    kill_process(pid(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
}

#[test]
fn files_beyond_a_limit_of_size_are_an_error() {
    let folder = Folder::empty();
    queries(&folder.input);
    let output = after("ulimit -f 100", &folder, &[]);
    assert_refused(&output, "out.safetensors: cannot be written: File too large", "ulimit -f");
    assert_eq!(folder.names(), ["in.safetensors"]);
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn small() -> Folder {
    Folder::with(&qkv(Dtype::F32, &[1, 1, 2, 8], &[1, 1, 2, 8], &[1, 1, 2, 8]))
}

#[test]
fn files_keep_the_permission_bits_of_what_they_replace() {
    let folder = small();
    for bits in [0o600, 0o640, 0o666, 0o755] {
        std::fs::write(&folder.output, b"old").unwrap();
        std::fs::set_permissions(&folder.output, Permissions::from_mode(bits)).unwrap();
        let output = after("umask 027", &folder, &[]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(format!("{:o}", mode(&folder.output)), format!("{bits:o}"));
        assert!(std::fs::read(&folder.output).unwrap().len() > 3);
        std::fs::remove_file(&folder.output).unwrap();
    }
    // Other output files, and links to a file that is replaced.
    let (target, link) = (folder.path().join("target"), folder.path().join("link.svg"));
    for args in [&["plan", "--svg"][..], &["kernels", "print", "mask_tiles", "--target", "rust", "-o"]] {
        std::fs::write(&target, b"old").unwrap();
        std::fs::set_permissions(&target, Permissions::from_mode(0o620)).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let output = within_a_minute(program().args(args).arg(&link));
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(std::fs::read(&target).unwrap().len() > 3, "{args:?}");
        assert_eq!(format!("{:o}", mode(&target)), "620", "{args:?}");
        std::fs::remove_file(&link).unwrap();
    }
}

#[test]
fn files_without_permission_to_write_are_kept() {
    let folder = small();
    for bits in [0o444, 0o400, 0o555] {
        std::fs::write(&folder.output, b"old").unwrap();
        std::fs::set_permissions(&folder.output, Permissions::from_mode(bits)).unwrap();
        folder.refuse(
            &[],
            "out.safetensors: cannot be written: the file is read-only, expected one that may be",
        );
        let link = folder.path().join("link.svg");
        std::os::unix::fs::symlink(&folder.output, &link).unwrap();
        let output = within_a_minute(program().args(["plan", "--svg"]).arg(&link));
        assert_refused(&output, "link.svg: cannot be written: the file is read-only", "link");
        assert_eq!((std::fs::read(&folder.output).unwrap(), mode(&folder.output)), (b"old".to_vec(), bits));
        std::fs::remove_file(&link).unwrap();
        std::fs::remove_file(&folder.output).unwrap();
    }
}

#[test]
fn new_files_have_the_bits_that_the_umask_leaves() {
    let folder = small();
    for (umask, bits) in [("022", "644"), ("027", "640"), ("077", "600"), ("000", "666")] {
        let output = after(&format!("umask {umask}"), &folder, &[]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(format!("{:o}", mode(&folder.output)), bits, "umask {umask}");
        std::fs::remove_file(&folder.output).unwrap();
    }
}

#[test]
fn inputs_that_are_no_regular_files() {
    let folder = Folder::empty();
    let path = |name: &str| folder.path().join(name);
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    std::fs::create_dir(path("directory")).unwrap();
    let _socket = UnixListener::bind(path("socket")).unwrap();
    std::os::unix::fs::symlink(path("pipe"), path("link")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", path("device")).unwrap();
    for name in ["pipe", "directory", "socket", "link", "device"] {
        let (input, out) = (path(name), path("out"));
        let input = input.to_str().unwrap();
        let why = format!("{input}: not a regular file, expected a ");
        for args in [
            &["run", input, "-o", out.to_str().unwrap()][..],
            &["plan", input],
            &["kv", input],
            &["bench", "--vs", input],
        ] {
            assert_refused(&within_a_minute(program().args(args)), &why, &args.join(" "));
        }
    }
}

/// Text that a program writes to a terminal, its standard error, and its output.
fn on_terminal(args: &[&str]) -> (String, Output) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
    let slave = std::fs::File::options().read(true).write(true).open(name).unwrap();
    let mut command = program();
    command.args(args).env("TERM", "xterm").stdout(Stdio::piped()).stderr(OwnedFd::from(slave));
    let child = command.spawn().unwrap();
    // The last slave is then the child's, and reading fails when it is closed.
    drop(command);
    let (mut shown, mut buffer) = (Vec::new(), [0; 4096]);
    let mut terminal = std::fs::File::from(master);
    while let Ok(n @ 1..) = terminal.read(&mut buffer) {
        shown.extend(&buffer[..n]);
    }
    (String::from_utf8_lossy(&shown).into_owned(), child.wait_with_output().unwrap())
}

#[test]
fn long_runs_show_progress_on_a_terminal_only() {
    let shape = [1, 4, 256, 64];
    let folder = Folder::with(&qkv(Dtype::F32, &shape, &shape, &shape));
    let (input, output) = (folder.input.to_str().unwrap(), folder.output.to_str().unwrap());
    for (backend, kernel) in [("reference", "reference-f32-d64"), ("cpu", "cpu-prefill-f32-d64-")] {
        let run = ["run", input, "-o", output, "--backend", backend];
        let (shown, output) = on_terminal(&run);
        assert!(output.status.success(), "{shown}");
        assert!(shown.contains(kernel) && shown.contains(", an estimated "), "{shown:?}");
        // The last thing drawn is an empty line.
        assert!(shown.ends_with("\u{1b}[2K"), "{shown:?}");
        let report = String::from_utf8(output.stdout).unwrap();
        assert!(report.starts_with("kernel     ") && !report.contains('\u{1b}'), "{report:?}");
        let output = program().args(run).output().unwrap();
        assert_eq!(stderr(&output), "", "{backend}");
    }
}

/// Standard error of a refused run, one datagram per write. The first few writes suffice.
fn written(args: &[&str]) -> Vec<String> {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut child = program().args(args).stdout(Stdio::null()).stderr(OwnedFd::from(theirs)).spawn().unwrap();
    let mut writes = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    while writes.len() < 20 {
        let ended = child.try_wait().unwrap();
        match ours.recv(&mut buffer) {
            Ok(n) => writes.push(String::from_utf8_lossy(&buffer[..n]).into_owned()),
            // All writes before the end have arrived.
            Err(_) if ended.is_some() => break,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    let _ = child.kill();
    child.wait().unwrap();
    writes
}

#[test]
fn lines_of_any_length_are_bounded_and_written_at_once() {
    let folder = Folder::empty();
    let input = folder.input.to_str().unwrap();
    let q = format!(r#"{{"dtype":"F32","shape":[0{}],"data_offsets":[0,0]}}"#, ",1".repeat(400_000));
    let other = r#"{"dtype":"F32","shape":[0,1,1,8],"data_offsets":[0,0]}"#;
    crate::files::write_raw(&folder.input, &format!(r#"{{"q":{q},"k":{other},"v":{other}}}"#), &[]);
    let line = format!(
        "flashtile: {input}: tensor q has shape [0, 1, 1, 1, 1, 1, 1, 1 and 399993 more], \
         expected [batch, heads, rows, dim]\n"
    );
    let out = folder.output.to_str().unwrap();
    assert_eq!(written(&["run", input, "-o", out]), [line]);

    // Names may have any length.
    let name = format!("start{}end", "\\u0007".repeat(100_000));
    crate::files::write_raw(
        &folder.input,
        &format!(r#"{{"mask_{name}":{other},"q":{other},"k":{other},"v":{other}}}"#),
        &[],
    );
    let lines = written(&["run", input, "-o", out]);
    let [line] = &lines[..] else { panic!("{} writes", lines.len()) };
    assert!(line.chars().count() < 2000, "{} characters", line.chars().count());
    assert!(line.starts_with(&format!("flashtile: {input}: tensor mask_start\\u0007")), "{line}");
    assert!(line.ends_with("end is not known, did you mean mask?\n"), "{line}");
    assert!(line.contains(" characters left out) ... "), "{line}");

    // Arguments from a shell may also have any length.
    let lines = written(&["plan", "--device", &"x".repeat(100_000)]);
    assert!(lines.len() == 1 && lines[0].len() < 2000 && lines[0].contains("left out"), "{lines:?}");
}

#[test]
fn lists_of_names_are_bounded() {
    let folder = Folder::empty();
    let input = folder.input.to_str().unwrap();
    let other = r#"{"dtype":"F32","shape":[0,1,1,8],"data_offsets":[0,0]}"#;
    let names: String = (0..1000).map(|n| format!(r#","x{n:03}":{other}"#)).collect();
    crate::files::write_raw(
        &folder.input,
        &format!(r#"{{"q":{other},"k":{other},"v":{other}{names}}}"#),
        &[],
    );
    for args in [&["run", input, "-o", folder.output.to_str().unwrap()][..], &["plan", input], &["kv", input]]
    {
        let output = within_a_minute(program().args(args).arg("--strict"));
        assert_refused(&output, "unknown tensors: x000, x001, x002, x003 and 996 more", &args.join(" "));
    }
}
