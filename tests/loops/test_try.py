import time
def test_try(make_loop, run, tmp_path):
    for method in ("rejection_sampling", "rso", "iterative_dpo"):
        t=time.time(); f=run(make_loop(method, tmp_path/method)); print(method, time.time()-t)
        for r in f.rows: print(r)
        print(f.lines("selected")[0])
    import os
    for root,_,files in os.walk(f.path): print(root, files)
