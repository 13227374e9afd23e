//! Temporary files and folders that neither a failure nor a signal leaves behind.
//!
//! On Linux, a file has no name until it is whole, so nothing is left whatever ends the process. Other systems, some
//! file systems, and folders need a name from the beginning; signals that can be handled remove it.

use std::io::Result;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// First characters of the names of temporary files and folders.
const PREFIX: &str = ".flashtile-";

/// Paths of existing temporary files and folders. The lock is held from before a file is created, renamed or removed
/// until the list is up to date, so that a signal never ends the process in between.
static EXISTING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn existing() -> MutexGuard<'static, Vec<PathBuf>> {
    EXISTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is removed unless it is renamed.
pub(crate) enum Temporary {
    #[cfg(target_os = "linux")]
    Unnamed(unnamed::Unnamed),
    Named(Named),
}

impl Temporary {
    /// Creates a file in a folder with permission bits `mode`, less the process's umask, on systems that have them.
    pub(crate) fn create(folder: &Path, mode: u32) -> Result<Self> {
        signals::outlive_size_limits();
        // If this fails for a reason other than the file system, creating a file with a name fails too, and says why.
        #[cfg(target_os = "linux")]
        if let Ok(file) = unnamed::Unnamed::create(folder, mode) {
            return Ok(Self::Unnamed(file));
        }
        Named::file(folder, mode).map(Self::Named)
    }

    /// A path to write the file by.
    pub(crate) fn path(&self) -> &Path {
        match self {
            #[cfg(target_os = "linux")]
            Self::Unnamed(file) => file.path(),
            Self::Named(file) => &file.path,
        }
    }

    /// Renames the file, replacing any file of that name.
    pub(crate) fn rename(self, to: &Path) -> Result<()> {
        match self {
            #[cfg(target_os = "linux")]
            Self::Unnamed(file) => file.rename(to),
            Self::Named(file) => file.rename(to),
        }
    }
}

#[cfg(target_os = "linux")]
mod unnamed {
    use rustix::fs::{AtFlags, CWD, linkat};
    use std::fs::File;
    use std::io::{ErrorKind, Result};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::{Path, PathBuf};

    /// A file without a name, which the system removes when it is closed.
    pub(crate) struct Unnamed {
        /// The link of the open file in `/proc`.
        path: PathBuf,
        folder: PathBuf,
        /// Keeps the file alive.
        _file: File,
    }

    impl Unnamed {
        pub(super) fn create(folder: &Path, mode: u32) -> Result<Self> {
            let mut options = File::options();
            let file = options.write(true).mode(mode).custom_flags(libc::O_TMPFILE).open(folder)?;
            let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
            // Without `/proc`, the file could not get a name.
            std::fs::metadata(&path)?;
            Ok(Self { path, folder: folder.to_owned(), _file: file })
        }

        pub(super) fn path(&self) -> &Path {
            &self.path
        }

        /// Gives the file its name. A new name takes one step. A link never replaces a file, so replacing one takes a
        /// temporary name first, under which the whole file stays if the process ends between the two system calls.
        pub(super) fn rename(self, to: &Path) -> Result<()> {
            let link = |name: &Path| -> Result<()> {
                Ok(linkat(CWD, &self.path, CWD, name, AtFlags::SYMLINK_FOLLOW)?)
            };
            match link(to) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                    let mut names = tempfile::Builder::new();
                    let named = names.prefix(super::PREFIX).make_in(&self.folder, link)?;
                    named.into_temp_path().persist(to).map_err(|e| e.error)
                }
                linked => linked,
            }
        }
    }
}

/// A file or a folder with a temporary name, which is removed unless it is renamed.
pub(crate) struct Named {
    path: PathBuf,
}

impl Named {
    fn create(parent: &Path, make: impl FnMut(&Path) -> Result<()>) -> Result<Self> {
        signals::clean_up_on()?;
        let mut existing = existing();
        let made = tempfile::Builder::new().prefix(PREFIX).make_in(parent, make)?;
        let path = made.into_temp_path().keep().map_err(|e| e.error)?;
        existing.push(path.clone());
        Ok(Self { path })
    }

    fn file(folder: &Path, mode: u32) -> Result<Self> {
        let mut options = std::fs::File::options();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
        #[cfg(not(unix))]
        let _ = mode;
        Self::create(folder, |path| options.open(path).map(drop))
    }

    /// Creates a folder in another one.
    pub(crate) fn folder(parent: &Path) -> Result<Self> {
        signals::outlive_size_limits();
        Self::create(parent, |path| std::fs::create_dir(path))
    }

    /// Writes a file into the folder. The lock keeps files from being added to a folder that is being removed.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let _held = existing();
        std::fs::write(self.path.join(name), bytes)
    }

    /// Renames the file or folder. A file replaces any other file of that name.
    pub(crate) fn rename(self, to: &Path) -> Result<()> {
        let _held = existing();
        std::fs::rename(&self.path, to)
    }
}

/// Removes a file, or a folder with its files. After a rename, nothing has the temporary name.
fn remove(path: &Path) {
    if std::fs::remove_file(path).is_err() {
        let _ = std::fs::remove_dir_all(path);
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let mut existing = existing();
        remove(&self.path);
        existing.retain(|path| *path != self.path);
    }
}

#[cfg(unix)]
mod signals {
    use signal_hook::consts::{
        SIGALRM, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXCPU, SIGXFSZ,
    };
    use signal_hook::iterator::Signals;
    use std::io::Result;
    use std::sync::{Arc, Mutex, Once, PoisonError};

    /// Signals that end a process by default and can be handled.
    const ENDING: [i32; 10] =
        [SIGALRM, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXCPU];

    /// Makes a write beyond the file size limit fail from now on. By default, and where this cannot be set, such a
    /// write ends the process.
    pub(super) fn outlive_size_limits() {
        static SET: Once = Once::new();
        SET.call_once(|| drop(signal_hook::flag::register(SIGXFSZ, Arc::default())));
    }

    /// Makes signals that end the process remove temporary files and folders first, from now on. The process still ends
    /// by the signal, as shells and build tools expect. A file without a name needs no handler: it is gone at once.
    pub(super) fn clean_up_on() -> Result<()> {
        static IS_SET: Mutex<bool> = Mutex::new(false);
        let mut is_set = IS_SET.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_set {
            return Ok(());
        }
        // A process that was started to ignore a signal, as by nohup, continues to do so.
        let mut signals = Signals::new(ENDING.into_iter().filter(|&signal| !is_ignored(signal)))?;
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            if let Some(signal) = signals.forever().next() {
                let existing = super::existing();
                existing.iter().for_each(|path| super::remove(path));
                // The lock is held to the end: no further file is created.
                let _ = signal_hook::low_level::emulate_default_handler(signal);
                std::process::exit(128 + signal);
            }
        })?;
        *is_set = true;
        Ok(())
    }

    #[allow(unsafe_code)]
    fn is_ignored(signal: i32) -> bool {
        // SAFETY: all zeros are a valid value of the struct, whose fields are integers and an optional function.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: without a new action, the call writes the current one to borrowed memory and changes nothing.
        let status = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        status == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(not(unix))]
mod signals {
    /// Other systems have no such limits.
    pub(super) fn outlive_size_limits() {}

    /// Other systems end a process without notice.
    pub(super) fn clean_up_on() -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Tests files with a name directly, because no file system that needs one from the beginning is at hand.
    #[test]
    fn files_with_a_temporary_name() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("to");
        for content in ["new", "replaced"] {
            let file = Named::file(folder.path(), 0o666).unwrap();
            assert!(names(folder.path()).iter().any(|name| name.starts_with(PREFIX)));
            std::fs::write(&file.path, content).unwrap();
            file.rename(&to).unwrap();
            assert_eq!(names(folder.path()), ["to"]);
            assert_eq!(std::fs::read_to_string(&to).unwrap(), content);
        }
        drop(Named::file(folder.path(), 0o666).unwrap());
        let file = Named::file(folder.path(), 0o666).unwrap();
        assert!(file.rename(&folder.path().join("absent").join("to")).is_err());
        assert_eq!(names(folder.path()), ["to"]);
        assert!(existing().is_empty());
        // The system's own words say why.
        let refused = Named::file(&folder.path().join("absent"), 0o666).err().unwrap();
        assert!(refused.raw_os_error().is_some(), "{refused}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn files_without_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("to");
        for content in ["new", "replaced"] {
            let before = names(folder.path());
            let file = Temporary::create(folder.path(), 0o666).unwrap();
            std::fs::write(file.path(), content).unwrap();
            assert!(matches!(file, Temporary::Unnamed(_)) && names(folder.path()) == before);
            file.rename(&to).unwrap();
            assert_eq!(names(folder.path()), ["to"]);
            assert_eq!(std::fs::read_to_string(&to).unwrap(), content);
        }
        let file = Temporary::create(folder.path(), 0o666).unwrap();
        // A folder cannot be replaced by a file.
        std::fs::create_dir(folder.path().join("folder")).unwrap();
        assert!(file.rename(&folder.path().join("folder")).is_err());
        assert_eq!(names(folder.path()).len(), 2);
    }
}
