package history

import (
	"slices"
	"testing"
)

// fenced is turn with a lock that has this number.
func fenced(process string, n int64, task string, from, to, fence int64) []Record {
	return set(turn(process, n, task, from, to), KindEnter, func(r *Record) { r.Fence = fence })
}

func write(task string, t, fence int64, err string) []Record {
	return []Record{{T: ms(t), Kind: KindWrite, Process: "w0-1", Task: task, Key: "k", Fence: fence, Err: err}}
}

func TestCheckFences(t *testing.T) {
	for _, test := range []struct {
		name    string
		history [][]Record
		want    string // the kind of the one violation, if any
	}{
		{"numbers grow", [][]Record{fenced("w0-1", 1, "a", 100, 200, 7), fenced("w1-1", 1, "b", 300, 400, 8)}, ""},
		{"a number twice", [][]Record{fenced("w0-1", 1, "a", 100, 200, 7), fenced("w1-1", 1, "b", 300, 400, 7)}, BadFence},
		{"numbers fall", [][]Record{fenced("w0-1", 1, "a", 100, 200, 8), fenced("w1-1", 1, "b", 300, 400, 7)}, BadFence},
		{"without fencing", [][]Record{turn("w0-1", 1, "a", 100, 200), turn("w1-1", 1, "b", 300, 400)}, ""},
		{"writes in order", [][]Record{write("a", 150, 7, ""), write("a", 180, 7, ""), write("b", 350, 8, "")}, ""},
		{"a late write is refused", [][]Record{write("a", 150, 7, ""), write("b", 350, 8, ""), write("a", 360, 7, "lower")}, ""},
		{"a late write is accepted", [][]Record{write("a", 150, 7, ""), write("b", 350, 8, ""), write("a", 360, 7, "")}, BadWrite},
		{"two writers of one number", [][]Record{write("a", 150, 7, ""), write("b", 350, 7, "")}, BadWrite},
	} {
		t.Run(test.name, func(t *testing.T) {
			all := inOrder(append(test.history, end(KindBye, "w0-1", 8000, ""), end(KindBye, "w1-1", 8000, ""))...)
			var kinds []string
			for _, v := range Check(all, terms).Violations {
				kinds = append(kinds, v.Kind)
			}
			if want := slices.DeleteFunc([]string{test.want}, func(k string) bool { return k == "" }); !slices.Equal(kinds, want) {
				t.Errorf("violations %q, want %q", kinds, want)
			}
		})
	}
}

// A holder that was paused between the reply to its acquire and the event about it seems to come later than it did.
func TestCheckFencesComparesOnlyLocksOneAfterTheOther(t *testing.T) {
	paused := fenced("w0-1", 1, "a", 500, 600, 7) // asked for at 98, below
	for i := range paused {
		if paused[i].Kind == KindSeen || paused[i].Kind == KindEnqueued {
			paused[i].T -= ms(400)
		}
	}
	all := inOrder(paused, fenced("w1-1", 1, "b", 300, 400, 8), end(KindBye, "w0-1", 8000, ""), end(KindBye, "w1-1", 8000, ""))
	if f := Check(all, terms); f.Count(BadFence) > 0 {
		t.Errorf("%+v", f.Violations)
	}
}
