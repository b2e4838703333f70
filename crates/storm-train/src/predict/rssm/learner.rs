//! Learning beside the steps: a lesson runs on its own thread until its result is needed. When that
//! is depends on steps and decisions, never on a clock, so the thread changes no bit.

use super::adam::Adam;
use super::lesson::Lessons;
use super::network::Tick;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::mpsc::{Receiver, Sender, channel};

/// What a lesson learns from.
pub(super) struct Lesson {
    pub(super) ticks: Vec<Tick>,
    /// Seed of the run, and the step.
    pub(super) bits: (u64, u32),
}

/// The parameters of the controller, and the graph of its lessons.
struct Student {
    adam: Adam,
    lessons: Lessons,
}

impl Student {
    fn learn(&mut self, lesson: &Lesson) {
        let Student { adam, lessons } = self;
        let (_, gradients) = lessons.learn(adam.parameters(), &lesson.ticks, lesson.bits);
        adam.step(gradients);
    }
}

/// The parameters of the controller, which lessons change.
pub(super) struct Learner {
    /// `None` while a lesson runs.
    student: Option<Box<Student>>,
    /// `None` before the first lesson.
    worker: Option<Worker>,
}

impl Learner {
    pub(super) fn new(adam: Adam, lessons: Lessons) -> Learner {
        Learner { student: Some(Box::new(Student { adam, lessons })), worker: None }
    }

    /// The parameters after all lessons. Waits for one that runs.
    pub(super) fn adam(&mut self) -> &mut Adam {
        let worker = &self.worker;
        let learned = || worker.as_ref().expect("one has them").learned();
        &mut self.student.get_or_insert_with(learned).adam
    }

    /// Begins a lesson, after the one before it.
    pub(super) fn begin(&mut self, lesson: Lesson) {
        self.adam();
        if self.worker.is_none() {
            self.worker = Worker::start();
        }
        let mut student = self.student.take().expect("no lesson runs");
        match &self.worker {
            Some(worker) => worker.begin(student, lesson),
            // The system allows no other thread.
            None => {
                student.learn(&lesson);
                self.student = Some(student);
            }
        }
    }
}

impl Drop for Learner {
    /// No lesson runs on without its learner.
    fn drop(&mut self) {
        self.adam();
    }
}

/// The thread of lessons. It is a pool of its own, so that kernels neither wait for threads of
/// another one nor take them from steps.
struct Worker {
    pool: ThreadPool,
    done: Sender<Box<Student>>,
    learned: Receiver<Box<Student>>,
}

impl Worker {
    fn start() -> Option<Worker> {
        let name = |_| "lessons".to_owned();
        let pool = ThreadPoolBuilder::new().num_threads(1).thread_name(name).build().ok()?;
        let (done, learned) = channel();
        Some(Worker { pool, done, learned })
    }

    fn begin(&self, mut student: Box<Student>, lesson: Lesson) {
        let done = self.done.clone();
        self.pool.spawn(move || {
            student.learn(&lesson);
            done.send(student).expect("the learner waits for it");
        });
    }

    fn learned(&self) -> Box<Student> {
        self.learned.recv().expect("it is sent")
    }
}

#[cfg(test)]
mod tests {
    use super::super::network::{ACTED, Network, OBSERVED};
    use super::*;

    fn lesson(number: u32) -> Lesson {
        let tick = |at: u32| Tick {
            action: [0.0; ACTED],
            observation: [0.1 * (number + at) as f32; OBSERVED],
            excess: 0.5,
            learners: 0xff,
            jump: None,
        };
        Lesson { ticks: (0..3).map(tick).collect(), bits: (7, number) }
    }

    #[test]
    fn lessons_on_their_thread_follow_each_other() {
        let network = Network::new();
        let student = || (Adam::new(network.initial(1)), Lessons::new(&network).expect("memory"));
        let (adam, lessons) = student();
        let mut expected = Student { adam, lessons };
        let (adam, lessons) = student();
        let mut learner = Learner::new(adam, lessons);
        for number in 0..4 {
            expected.learn(&lesson(number));
            learner.begin(lesson(number));
            // Asked for in between, or not.
            if number == 1 {
                assert_eq!(learner.adam().vectors(), expected.adam.vectors());
            }
        }
        assert_eq!(learner.adam().vectors(), expected.adam.vectors());
        assert_eq!(learner.adam().steps(), 4);
    }
}
