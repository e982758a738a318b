from intervals import merge, total

print("merge:", merge([(1, 10), (2, 3)]), "expected: [(1, 10)]")
print("total:", total([(1, 3)]), "expected: 3")
