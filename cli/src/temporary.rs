//! Temporary files and folders that neither a failure nor a signal leaves behind.
//!
//! On Linux, a file has no name until it is whole: whatever ends the process, nothing is left. Other systems, some file
//! systems and folders need a name from the beginning, which signals that can be handled remove.

use std::fs::Permissions;
use std::io::Result;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::{TempDir, TempPath};

/// First characters of the names of temporary files and folders.
const PREFIX: &str = ".flashtile-";

/// Paths of existing temporary files and folders. The lock is held while a file is created, renamed or removed and until the list
/// is up to date, so that a signal never ends the process in between.
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
        signals::outlive_size_limits()?;
        // Where this fails for another reason than the file system, so does a file with a name, which says why.
        #[cfg(target_os = "linux")]
        if let Ok(file) = unnamed::Unnamed::create(folder, mode) {
            return Ok(Self::Unnamed(file));
        }
        Named::create(folder, mode).map(Self::Named)
    }

    /// A path to write the file by.
    pub(crate) fn path(&self) -> &Path {
        match self {
            #[cfg(target_os = "linux")]
            Self::Unnamed(file) => file.path(),
            Self::Named(file) => file.path(),
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
        /// Keeps the file.
        _file: File,
    }

    impl Unnamed {
        pub(super) fn create(folder: &Path, mode: u32) -> Result<Self> {
            let mut options = File::options();
            let file = options.write(true).mode(mode).custom_flags(libc::O_TMPFILE).open(folder)?;
            let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
            // Without this file system, the file could not get a name.
            std::fs::metadata(&path)?;
            Ok(Self { path, folder: folder.to_owned(), _file: file })
        }

        pub(super) fn path(&self) -> &Path {
            &self.path
        }

        /// A new name takes one step. A link never replaces a file: that takes another name first, under which the whole
        /// file stays if the process is ended between two system calls.
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

/// A file with a temporary name.
pub(crate) struct Named {
    /// `None` once the file has been renamed or removed.
    file: Option<TempPath>,
}

impl Named {
    fn create(folder: &Path, mode: u32) -> Result<Self> {
        signals::clean_up_on()?;
        let mut options = std::fs::File::options();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
        #[cfg(not(unix))]
        let _ = mode;
        let mut names = tempfile::Builder::new();
        let mut existing = existing();
        let file = names.prefix(PREFIX).make_in(folder, |path| options.open(path))?.into_temp_path();
        existing.push(file.to_path_buf());
        Ok(Self { file: Some(file) })
    }

    fn path(&self) -> &Path {
        self.file.as_deref().unwrap_or(Path::new(""))
    }

    fn rename(mut self, to: &Path) -> Result<()> {
        let mut existing = existing();
        let Some(file) = self.file.take() else { return Ok(()) };
        let from = file.to_path_buf();
        // On failure, the error owns the file and removes it.
        let renamed = file.persist(to).map_err(|e| e.error);
        existing.retain(|path| *path != from);
        renamed
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            let mut existing = existing();
            existing.retain(|path| *path != *file);
            drop(file);
        }
    }
}

/// A folder that is removed with its files unless it is renamed.
pub(crate) struct TemporaryFolder {
    /// `None` once the folder has been renamed or removed.
    folder: Option<TempDir>,
}

impl TemporaryFolder {
    /// Creates a folder in another one, with these permissions, by default the ones of a new folder.
    pub(crate) fn create(parent: &Path, permissions: Option<Permissions>) -> Result<Self> {
        signals::outlive_size_limits()?;
        signals::clean_up_on()?;
        let mut builder = tempfile::Builder::new();
        builder.prefix(PREFIX);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(Permissions::from_mode(0o777));
        }
        let mut existing = existing();
        let folder = builder.tempdir_in(parent)?;
        existing.push(folder.path().to_owned());
        let created = Self { folder: Some(folder) };
        drop(existing);
        if let Some(permissions) = permissions {
            std::fs::set_permissions(created.path(), permissions)?;
        }
        Ok(created)
    }

    fn path(&self) -> &Path {
        self.folder.as_ref().map_or(Path::new(""), TempDir::path)
    }

    /// Writes a file of the folder. Under the lock, no file is added to a folder that is being removed.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let _held = existing();
        std::fs::write(self.path().join(name), bytes)
    }

    /// Renames the folder, replacing an empty folder of that name.
    pub(crate) fn rename(mut self, to: &Path) -> Result<()> {
        let mut existing = existing();
        let Some(folder) = self.folder.take() else { return Ok(()) };
        let from = folder.path().to_owned();
        // Elsewhere than on Unix, nothing is renamed over a folder.
        let emptied = if cfg!(not(unix)) && to.is_dir() { std::fs::remove_dir(to) } else { Ok(()) };
        let renamed = emptied.and_then(|()| std::fs::rename(&from, to));
        if renamed.is_ok() {
            // Nothing of that name is left to be removed.
            let _ = folder.keep();
        }
        existing.retain(|path| *path != from);
        renamed
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if let Some(folder) = self.folder.take() {
            let mut existing = existing();
            existing.retain(|path| path != folder.path());
            drop(folder);
        }
    }
}

#[cfg(unix)]
mod signals {
    use signal_hook::consts::{
        SIGALRM, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXCPU, SIGXFSZ,
    };
    use signal_hook::iterator::Signals;
    use std::io::Result;
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, Mutex, PoisonError};

    /// Signals that end a process by default, and that a handler may follow.
    const ENDING: [i32; 10] =
        [SIGALRM, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXCPU];

    /// Sets handlers, unless they have been set.
    fn once(is_set: &Mutex<bool>, set: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut is_set = is_set.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_set {
            set()?;
            *is_set = true;
        }
        Ok(())
    }

    /// From here on, a write beyond the file size limit fails. By default, it ends the process.
    pub(super) fn outlive_size_limits() -> Result<()> {
        static SET: Mutex<bool> = Mutex::new(false);
        once(&SET, || {
            signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
            Ok(())
        })
    }

    /// From here on, signals that end the process remove temporary files and folders first. The process still ends by the signal,
    /// as shells and build tools expect.
    pub(super) fn clean_up_on() -> Result<()> {
        static SET: Mutex<bool> = Mutex::new(false);
        once(&SET, || {
            // A process that was started to ignore a signal, as by nohup, continues to do so.
            let mut signals = Signals::new(ENDING.into_iter().filter(|&signal| !is_ignored(signal)))?;
            std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
                if let Some(signal) = signals.forever().next() {
                    let existing = super::existing();
                    for path in existing.iter() {
                        if std::fs::remove_file(path).is_err() {
                            let _ = std::fs::remove_dir_all(path);
                        }
                    }
                    // The lock is held to the end: no further file is created.
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                    std::process::exit(128 + signal);
                }
            })?;
            Ok(())
        })
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
    pub(super) fn outlive_size_limits() -> std::io::Result<()> {
        Ok(())
    }

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

    /// File systems on which a file needs a name from the beginning are not at hand.
    #[test]
    fn files_with_a_temporary_name() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("to");
        for content in ["new", "replaced"] {
            let file = Named::create(folder.path(), 0o666).unwrap();
            assert!(names(folder.path()).iter().any(|name| name.starts_with(PREFIX)));
            std::fs::write(file.path(), content).unwrap();
            file.rename(&to).unwrap();
            assert_eq!(names(folder.path()), ["to"]);
            assert_eq!(std::fs::read_to_string(&to).unwrap(), content);
        }
        drop(Named::create(folder.path(), 0o666).unwrap());
        let file = Named::create(folder.path(), 0o666).unwrap();
        assert!(file.rename(&folder.path().join("absent").join("to")).is_err());
        assert_eq!(names(folder.path()), ["to"]);
        assert!(existing().is_empty());
        // The system's own words say why.
        let refused = Named::create(&folder.path().join("absent"), 0o666).err().unwrap();
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
