//! A directory that appears complete or not at all.
//!
//! It is written in a folder next to its target, `.name.purpose-…`, which contains:
//!
//! | name | content |
//! |---|---|
//! | `lock` | kept locked while the folder is in use |
//! | `new` | the directory being written. After an exchange, the replaced directory |
//! | `old` | the replaced directory, if the file system cannot exchange names |
//! | `exchanging` | names the written and the replaced directory, from before the exchange on |
//!
//! A folder left by a killed process is removed if it contains only a written or a checked
//! directory. A replaced directory is checked again.

use crate::claim;
use crate::exchange::{Exchange, exchange};
use crate::identity::Identity;
use crate::place::{rename_new, sync_directory};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

const LOCK: &str = "lock";
const NEW: &str = "new";
const OLD: &str = "old";
const EXCHANGING: &str = "exchanging";

/// Why an output was not moved to its target.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// The target must be kept.
    #[error("{problem}")]
    Refused {
        /// Why, and what to do. Callers prepend the path.
        problem: String,
    },
    /// A file system operation failed.
    #[error("cannot {doing} {path}: {source}", path = .path.display())]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl StageError {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> StageError {
        let path = path.to_owned();
        move |source| StageError::Io { doing, path: path.clone(), source }
    }

    /// Converts to an [`io::Error`].
    pub fn into_io(self) -> io::Error {
        let kind = match &self {
            StageError::Refused { .. } => ErrorKind::InvalidInput,
            StageError::Io { source, .. } => source.kind(),
        };
        io::Error::new(kind, self)
    }

    pub(crate) fn refused(problem: impl Into<String>) -> StageError {
        StageError::Refused { problem: problem.into() }
    }
}

/// Decides whether a directory that is not empty may be replaced. The error says why not and what
/// to do.
type MayReplace = Box<dyn Fn(&Path) -> Result<(), String> + Send>;

/// A directory that is written next to its target. Dropping it before `finish` removes it.
pub struct StagedDirectory {
    /// The hidden folder next to the target.
    folder: PathBuf,
    /// The directory being written.
    new: PathBuf,
    target: PathBuf,
    found: Found,
    may_replace: MayReplace,
    /// Released when this is dropped or the process dies.
    _lock: File,
}

/// What was at the target at the first check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    EmptyDirectory,
    Directory(Identity),
}

impl std::fmt::Debug for StagedDirectory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("StagedDirectory");
        debug.field("new", &self.new).field("target", &self.target).field("found", &self.found);
        debug.finish_non_exhaustive()
    }
}

impl StagedDirectory {
    /// Checks that `target` may be written and creates a hidden folder next to it, creating missing
    /// parent directories. `purpose` becomes part of its name. Removes leftovers of killed
    /// processes there.
    ///
    /// A directory that is not empty is replaced only if `may_replace` allows it, now and again
    /// after the exchange.
    ///
    /// # Errors
    /// [`StageError::Refused`] if `target` must be kept.
    pub fn create(
        target: &Path,
        purpose: &str,
        may_replace: impl Fn(&Path) -> Result<(), String> + Send + 'static,
    ) -> Result<StagedDirectory, StageError> {
        if target.file_name().is_none() {
            return Err(StageError::refused("does not name a new directory; add a name"));
        }
        let may_replace: MayReplace = Box::new(may_replace);
        let (target, found) = look(target, &may_replace)?;
        let Some(name) = target.file_name() else {
            return Err(StageError::refused("does not name a new directory; add a name"));
        };
        let parent = claim::parent_of(&target).to_owned();
        let prefix = claim::prefix(name, purpose);
        remove_leftovers(&target, prefix.as_encoded_bytes(), &may_replace);
        for _ in 0..claim::ATTEMPTS {
            let folder =
                tempfile::Builder::new().prefix(&prefix).rand_bytes(12).tempdir_in(&parent);
            let folder = folder.map_err(StageError::io("create a directory in", &parent))?.keep();
            if let Some(lock) = lock_new(&folder)? {
                let new = folder.join(NEW);
                let staged =
                    StagedDirectory { folder, new, target, found, may_replace, _lock: lock };
                fs::create_dir(&staged.new)
                    .map_err(StageError::io("create the directory", &staged.new))?;
                return Ok(staged);
            }
        }
        let source = io::Error::other("other processes keep removing it");
        Err(StageError::io("create a directory in", &parent)(source))
    }

    /// The directory to write to.
    pub fn path(&self) -> &Path {
        &self.new
    }

    /// Moves the directory to its target. The caller must have flushed the files in it to disk.
    ///
    /// # Errors
    /// [`StageError::Refused`] if something else has appeared at the target. It is kept, and the
    /// new directory is removed.
    pub fn finish(self) -> Result<(), StageError> {
        self.finish_with(exchange)
    }

    fn finish_with(
        self,
        exchange: fn(&Path, &Path) -> io::Result<Exchange>,
    ) -> Result<(), StageError> {
        sync_directory(&self.new).map_err(StageError::io("flush", &self.new))?;
        match self.found {
            Found::Nothing => self.rename_to_target()?,
            // The system renames a directory only onto an empty directory.
            Found::EmptyDirectory => {
                fs::rename(&self.new, &self.target).map_err(|error| self.not_placed(error))?;
            }
            Found::Directory(identity) => self.replace(identity, exchange)?,
        }
        let parent = claim::parent_of(&self.target);
        sync_directory(parent).map_err(StageError::io("flush", parent))
    }

    fn rename_to_target(&self) -> Result<(), StageError> {
        rename_new(&self.new, &self.target).map_err(|error| self.not_placed(error))
    }

    fn not_placed(&self, error: io::Error) -> StageError {
        match error.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty | ErrorKind::NotADirectory => {
                changed("something appeared there")
            }
            _ => StageError::io("put a directory in place at", &self.target)(error),
        }
    }

    /// Replaces only the directory that was checked.
    fn replace(
        &self,
        checked: Identity,
        exchange: fn(&Path, &Path) -> io::Result<Exchange>,
    ) -> Result<(), StageError> {
        let mark = self.folder.join(EXCHANGING);
        let written = Identity::of(&self.new).map_err(StageError::io("look at", &self.new))?;
        write_synced(&mark, &Mark { written, checked }.to_text())
            .map_err(StageError::io("write", &mark))?;
        let failed = StageError::io("replace", &self.target);
        let replaced = match exchange(&self.new, &self.target) {
            Ok(Exchange::Done) => {
                let problem = self.is_as_checked(&self.new, checked);
                if problem.is_err() {
                    // If this moves something else out of the target, `remove_folder` keeps it.
                    exchange(&self.new, &self.target).map_err(&failed)?;
                }
                problem
            }
            Ok(Exchange::Unsupported) => self.replace_in_steps(checked),
            Err(error) if error.kind() == ErrorKind::NotFound => self.rename_to_target(),
            Err(error) => Err(failed(error)),
        };
        if replaced.is_ok() {
            // Without the mark, `remove_folder` deletes the replaced directory. With it,
            // `remove_folder` checks that directory again.
            claim::delete(|| fs::remove_file(&mark));
        }
        replaced
    }

    /// For file systems that cannot exchange names. For a moment, neither directory is at the
    /// target.
    fn replace_in_steps(&self, checked: Identity) -> Result<(), StageError> {
        let old = self.folder.join(OLD);
        rename_new(&self.target, &old).map_err(StageError::io("move aside", &self.target))?;
        let placed = self.is_as_checked(&old, checked).and_then(|()| self.rename_to_target());
        if placed.is_err() {
            // If even this fails, the directory stays here, and `remove_folder` keeps it.
            rename_new(&old, &self.target).ok();
        }
        placed
    }

    /// Checks that the directory taken from the target is the checked one and may still be
    /// replaced.
    fn is_as_checked(&self, path: &Path, checked: Identity) -> Result<(), StageError> {
        let found = Identity::of(path).map_err(StageError::io("look at", path))?;
        if found != checked {
            return Err(changed("it was replaced by something else"));
        }
        (self.may_replace)(path).map_err(|problem| changed(&problem))
    }
}

impl Drop for StagedDirectory {
    fn drop(&mut self) {
        remove_folder(&self.folder, &self.target, &self.may_replace);
    }
}

/// The content of the file `exchanging`, which means that an exchange may have begun.
struct Mark {
    /// The directory that was written.
    written: Identity,
    /// The directory that it may replace.
    checked: Identity,
}

impl Mark {
    fn to_text(&self) -> String {
        format!("{}\n{}\n", self.written.to_text(), self.checked.to_text())
    }

    /// `None` if the file is missing or incomplete. The file is flushed before the exchange, so the
    /// exchange has not begun.
    fn read(path: &Path) -> io::Result<Option<Mark>> {
        let read = || match fs::read_to_string(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
            text => text,
        };
        // Retry once, as for deletions: a transient failure must not leave a folder behind.
        let text = read().or_else(|_| read())?;
        let mut lines = text.strip_suffix('\n').into_iter().flat_map(|text| text.split('\n'));
        let (written, checked) = (lines.next(), lines.next());
        let identity = |line: Option<&str>| line.and_then(Identity::from_text);
        Ok(identity(written)
            .zip(identity(checked))
            .map(|(written, checked)| Mark { written, checked }))
    }
}

fn changed(how: &str) -> StageError {
    StageError::refused(format!(
        "changed while it was being written ({how}); its content was kept; run the command again"
    ))
}

/// The resolved target, and what is there.
fn look(target: &Path, may_replace: &MayReplace) -> Result<(PathBuf, Found), StageError> {
    if target.symlink_metadata().is_err() {
        let parent = claim::parent_of(target);
        fs::create_dir_all(parent).map_err(StageError::io("create the directory", parent))?;
        let parent = parent.canonicalize().map_err(StageError::io("open", parent))?;
        let path = target.file_name().map_or(parent.clone(), |name| parent.join(name));
        return Ok((path, Found::Nothing));
    }
    // Follow a link: replace the directory that it points to, not the link.
    let path = target.canonicalize().map_err(StageError::io("open", target))?;
    if !path.is_dir() {
        return Err(StageError::refused("is not a directory; name another"));
    }
    let identity = Identity::of(&path).map_err(StageError::io("look at", &path))?;
    let mut entries = fs::read_dir(&path).map_err(StageError::io("list", &path))?;
    if entries.next().is_none() {
        return Ok((path, Found::EmptyDirectory));
    }
    may_replace(&path).map_err(StageError::refused)?;
    Ok((path, Found::Directory(identity)))
}

/// Creates and takes the lock of a new folder. `None` if another process removed the folder as a
/// leftover.
fn lock_new(folder: &Path) -> Result<Option<File>, StageError> {
    let path = folder.join(LOCK);
    let failed = StageError::io("create", &path);
    match File::options().read(true).write(true).create_new(true).open(&path) {
        Ok(lock) => Ok(claim::lock(&lock).map_err(failed)?.then_some(lock)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            fs::remove_dir(folder).ok();
            Err(failed(error))
        }
    }
}

/// Removes the folders left by killed processes.
fn remove_leftovers(target: &Path, prefix: &[u8], may_replace: &MayReplace) {
    for entry in fs::read_dir(claim::parent_of(target)).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().as_encoded_bytes().starts_with(prefix);
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let folder = entry.path();
        match claim::open_lock(&folder.join(LOCK)) {
            // The lock is held until the folder is gone.
            Ok(lock) if claim::is_free(&lock) => remove_folder(&folder, target, may_replace),
            Ok(_) => {}
            // Its process was killed before it created the lock, or is about to create it. The
            // folder is empty either way.
            Err(_) => drop(fs::remove_dir(&folder)),
        }
    }
}

/// Removes a hidden folder, unless it contains a directory that must be kept. After a failure, the
/// next process removes it.
fn remove_folder(folder: &Path, target: &Path, may_replace: &MayReplace) {
    let (new, old, mark) = (folder.join(NEW), folder.join(OLD), folder.join(EXCHANGING));
    match Mark::read(&mark) {
        Ok(None) => {}
        Ok(Some(mark)) => {
            let at = |path: &Path| Identity::of(path).ok();
            let is_replaced = |path: &Path| {
                let placed = at(target) == Some(mark.written) && at(path) == Some(mark.checked);
                placed && may_replace(path).is_ok()
            };
            let may_go = |path: &Path| {
                at(path).is_none_or(|found| found == mark.written) || is_replaced(path)
            };
            if !may_go(&new) || !may_go(&old) {
                return;
            }
        }
        Err(_) => return,
    }
    // Remove the mark first, because a partly deleted directory would not pass the check again.
    // Remove the lock last, because without it the rest would not be recognized.
    let is_gone = claim::delete(|| fs::remove_file(&mark))
        && claim::delete(|| fs::remove_dir_all(&new))
        && claim::delete(|| fs::remove_dir_all(&old));
    if is_gone {
        claim::delete(|| fs::remove_file(folder.join(LOCK)));
        claim::delete(|| fs::remove_dir(folder));
    }
}

fn write_synced(path: &Path, text: &str) -> io::Result<()> {
    use std::io::Write;
    let mut file = File::create_new(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    sync_directory(claim::parent_of(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with an output directory that contains one file, `before`.
    struct Scene {
        folder: tempfile::TempDir,
    }

    type ExchangeFn = fn(&Path, &Path) -> io::Result<Exchange>;

    fn unsupported(_: &Path, _: &Path) -> io::Result<Exchange> {
        Ok(Exchange::Unsupported)
    }

    const BOTH: [ExchangeFn; 2] = [exchange, unsupported];

    impl Scene {
        fn new() -> Scene {
            Scene { folder: tempfile::tempdir().unwrap() }
        }

        fn with_output() -> Scene {
            let scene = Scene::new();
            scene.fill("out", "before");
            scene
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        /// Creates a directory with a file of this name.
        fn fill(&self, directory: &str, file: &str) {
            fs::create_dir_all(self.path(directory)).unwrap();
            fs::write(self.path(directory).join(file), file).unwrap();
        }

        /// A staged directory that contains one file, `after`.
        fn staged(
            &self,
            may_replace: impl Fn(&Path) -> Result<(), String> + Send + 'static,
        ) -> StagedDirectory {
            let staged =
                StagedDirectory::create(&self.path("out"), "writing", may_replace).unwrap();
            fs::write(staged.path().join("after"), "after").unwrap();
            staged
        }

        /// Names in a directory, including hidden ones.
        fn names(&self, directory: &str) -> Vec<String> {
            let entries = fs::read_dir(self.path(directory)).unwrap();
            let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
            let mut names: Vec<_> =
                entries.map(|entry| name(entry).into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    fn never(_: &Path) -> Result<(), String> {
        Err("it is precious".to_owned())
    }

    fn always(_: &Path) -> Result<(), String> {
        Ok(())
    }

    /// Allows replacement unless a file was added.
    fn unless_extended(path: &Path) -> Result<(), String> {
        match path.join("thesis").exists() {
            true => Err("it holds a thesis".to_owned()),
            false => Ok(()),
        }
    }

    fn is_refusal(result: Result<(), StageError>) -> bool {
        matches!(result, Err(StageError::Refused { .. }))
    }

    #[test]
    fn a_new_directory_appears_whole() {
        let scene = Scene::new();
        let staged = scene.staged(never);
        assert!(!scene.path("out").exists());
        staged.finish().unwrap();
        assert_eq!(scene.names("."), ["out"]);
        assert_eq!(scene.names("out"), ["after"]);
    }

    #[test]
    fn a_dropped_one_leaves_nothing() {
        let scene = Scene::with_output();
        drop(scene.staged(always));
        assert_eq!(scene.names("."), ["out"]);
        assert_eq!(scene.names("out"), ["before"]);
    }

    #[test]
    fn an_old_one_is_replaced() {
        for exchange in BOTH {
            let scene = Scene::with_output();
            scene.staged(always).finish_with(exchange).unwrap();
            assert_eq!(scene.names("."), ["out"]);
            assert_eq!(scene.names("out"), ["after"]);
        }
    }

    #[test]
    fn what_appears_meanwhile_is_kept() {
        for exchange in BOTH {
            let scene = Scene::new();
            let staged = scene.staged(always);
            scene.fill("out", "foreign");
            assert!(is_refusal(staged.finish_with(exchange)));
            assert_eq!(
                (scene.names("."), scene.names("out")),
                (vec!["out".into()], vec!["foreign".into()])
            );
        }
        // Not even an empty directory or a file is replaced.
        let scene = Scene::new();
        let staged = scene.staged(always);
        fs::create_dir(scene.path("out")).unwrap();
        assert!(is_refusal(staged.finish()));
        let scene = Scene::new();
        let staged = scene.staged(always);
        fs::write(scene.path("out"), "file").unwrap();
        assert!(is_refusal(staged.finish()));
        assert_eq!(fs::read(scene.path("out")).unwrap(), b"file");
    }

    #[test]
    fn an_empty_directory_is_replaced_while_it_is_empty() {
        let scene = Scene::new();
        fs::create_dir(scene.path("out")).unwrap();
        scene.staged(never).finish().unwrap();
        assert_eq!(scene.names("out"), ["after"]);
        let scene = Scene::new();
        fs::create_dir(scene.path("out")).unwrap();
        let staged = scene.staged(never);
        scene.fill("out", "foreign");
        assert!(is_refusal(staged.finish()));
        assert_eq!(
            (scene.names("."), scene.names("out")),
            (vec!["out".into()], vec!["foreign".into()])
        );
    }

    #[test]
    fn another_directory_than_the_checked_one_is_kept() {
        for exchange in BOTH {
            let scene = Scene::with_output();
            let staged = scene.staged(always);
            fs::rename(scene.path("out"), scene.path("elsewhere")).unwrap();
            scene.fill("out", "foreign");
            assert!(is_refusal(staged.finish_with(exchange)));
            assert_eq!(scene.names("."), ["elsewhere", "out"]);
            assert_eq!(scene.names("out"), ["foreign"]);
        }
    }

    #[test]
    fn the_checked_directory_is_kept_if_it_got_something_else() {
        for exchange in BOTH {
            let scene = Scene::with_output();
            let staged = scene.staged(unless_extended);
            scene.fill("out", "thesis");
            let error = staged.finish_with(exchange).unwrap_err().to_string();
            assert!(error.contains("holds a thesis"), "{error}");
            assert_eq!(scene.names("."), ["out"]);
            assert_eq!(scene.names("out"), ["before", "thesis"]);
        }
    }

    #[test]
    fn what_may_not_be_replaced_is_refused_at_once() {
        let scene = Scene::with_output();
        let refusal = |target: &Path| {
            StagedDirectory::create(target, "writing", never).unwrap_err().to_string()
        };
        assert_eq!(refusal(&scene.path("out")), "it is precious");
        assert!(refusal(&scene.path("out/before")).contains("not a directory"));
        for nameless in ["/", ".", "..", "a/.."] {
            assert!(refusal(Path::new(nameless)).contains("add a name"), "{nameless}");
        }
        std::os::unix::fs::symlink("nowhere", scene.path("dangling")).unwrap();
        refusal(&scene.path("dangling"));
        assert_eq!(scene.names("."), ["dangling", "out"]);
    }

    #[test]
    fn a_link_leads_to_the_directory_that_is_replaced() {
        let scene = Scene::new();
        scene.fill("real", "before");
        std::os::unix::fs::symlink("real", scene.path("out")).unwrap();
        scene.staged(always).finish().unwrap();
        assert!(scene.path("out").is_symlink());
        assert_eq!(scene.names("real"), ["after"]);
        assert_eq!(scene.names("."), ["out", "real"]);
    }

    /// Simulates a process that is killed now.
    fn kill(staged: StagedDirectory) {
        let lock = staged._lock.try_clone().unwrap();
        std::mem::forget(staged);
        lock.unlock().unwrap();
    }

    #[test]
    fn leftovers_are_removed_by_the_next_one() {
        let scene = Scene::new();
        kill(scene.staged(never));
        let live = scene.staged(never);
        // Simulates a process killed between creating the folder and its lock.
        fs::create_dir(scene.path(".out.writing-early")).unwrap();
        assert_eq!(scene.names(".").len(), 2);
        let other = scene.staged(never);
        assert_eq!(scene.names(".").len(), 2, "the live one and the new one");
        other.finish().unwrap();
        assert!(is_refusal(live.finish()));
        assert_eq!(scene.names("."), ["out"]);
    }

    /// Simulates a process that is killed right after the exchange.
    fn kill_after_exchange(staged: StagedDirectory, mark: &str) -> PathBuf {
        fs::write(staged.folder.join(EXCHANGING), mark).unwrap();
        let folder = staged.folder.clone();
        assert!(matches!(exchange(&staged.new, &staged.target).unwrap(), Exchange::Done));
        kill(staged);
        folder
    }

    fn mark_of(staged: &StagedDirectory, checked: &Path) -> String {
        let written = Identity::of(&staged.new).unwrap();
        Mark { written, checked: Identity::of(checked).unwrap() }.to_text()
    }

    #[test]
    fn an_exchange_without_its_check_is_checked_by_the_next_one() {
        let scene = Scene::with_output();
        let staged = scene.staged(always);
        let mark = mark_of(&staged, &staged.target);
        let folder = kill_after_exchange(staged, &mark);
        assert_eq!(scene.names("out"), ["after"]);
        drop(scene.staged(always));
        assert!(!folder.exists());
        assert_eq!(scene.names("out"), ["after"]);
    }

    #[test]
    fn a_leftover_with_something_else_in_it_is_kept() {
        let other_than_checked = |scene: &Scene, staged: &StagedDirectory| {
            fs::rename(&staged.target, scene.path("elsewhere")).unwrap();
            scene.fill("out", "before");
            mark_of(staged, &scene.path("elsewhere"))
        };
        let extended = |scene: &Scene, staged: &StagedDirectory| {
            scene.fill("out", "thesis");
            mark_of(staged, &staged.target)
        };
        let cases: [fn(&Scene, &StagedDirectory) -> String; 2] = [other_than_checked, extended];
        for case in cases {
            let scene = Scene::with_output();
            let staged = scene.staged(always);
            let mark = case(&scene, &staged);
            let folder = kill_after_exchange(staged, &mark);
            drop(scene.staged(unless_extended));
            assert!(folder.join(NEW).join("before").exists());
            // After exchanging back, `new` is the directory that the killed process wrote.
            exchange(&folder.join(NEW), &scene.path("out")).unwrap();
            drop(StagedDirectory::create(&scene.path("out"), "writing", always).unwrap());
            assert!(!folder.exists());
            assert!(scene.path("out/before").exists());
        }
    }

    /// Without an exchange of names, the target is missing for a moment.
    #[test]
    fn a_directory_that_was_moved_aside_is_kept_until_another_is_in_its_place() {
        let scene = Scene::with_output();
        let staged = scene.staged(always);
        let mark = mark_of(&staged, &staged.target);
        fs::write(staged.folder.join(EXCHANGING), mark).unwrap();
        let (folder, target) = (staged.folder.clone(), staged.target.clone());
        fs::rename(&target, folder.join(OLD)).unwrap();
        kill(staged);
        drop(scene.staged(always));
        assert!(folder.join(OLD).join("before").exists());
        fs::rename(folder.join(NEW), &target).unwrap();
        drop(scene.staged(always));
        assert!(!folder.exists());
        assert_eq!(scene.names("out"), ["after"]);
    }

    /// The process was killed while writing the mark, or the disk was full. The exchange has not
    /// begun.
    #[test]
    fn a_mark_that_is_not_whole_keeps_nothing() {
        for bytes in 0.. {
            let scene = Scene::with_output();
            let staged = scene.staged(always);
            let mark = mark_of(&staged, &staged.target);
            let folder = staged.folder.clone();
            if bytes == mark.len() {
                break;
            }
            fs::write(folder.join(EXCHANGING), &mark[..bytes]).unwrap();
            assert!(Mark::read(&folder.join(EXCHANGING)).unwrap().is_none(), "{bytes} of {mark:?}");
            kill(staged);
            drop(scene.staged(always));
            assert!(!folder.exists(), "{bytes} of {mark:?}");
        }
    }
}
